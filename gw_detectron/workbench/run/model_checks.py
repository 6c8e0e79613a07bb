"""Check that the model can be built, that its norms can learn, and that the start weights fit it."""

import re
import shlex
from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils import comm
from torch import nn

from ...config import get_value
from ...errors import CheckReport, ConfigError, summarize_names
from ...layers import FrozenBatchWhitening2d
from ...layers.mixed_norms import MixedNorm
from ...modeling.build import NORM_KEYS, build_checked_model, unread_keys
from ...norms import is_synchronized, norm_spec
from ...weights import Checkpoint, LazyCheckpoint, norm_differences, norm_mismatch
from ...weights.network_record import (
    PREPROCESSING,
    ZOO_DETECTOR,
    Preprocessing,
    preprocessing_errors,
)
from ...weights.opening import config_beside
from ...weights.recording import expected_preprocessing, model_warnings

_FROZEN = (FrozenBatchNorm2d, FrozenBatchWhitening2d, MixedNorm)
# part of an address -> preprocessing of these weights, by Detectron2's model zoo and this package
_PREPROCESSING = {
    r"^gw://imagenet/": PREPROCESSING["torchvision"],
    r"/ImageNetPretrained/torchvision/": PREPROCESSING["torchvision"],
    r"/ImageNetPretrained/MSRA/": PREPROCESSING["detectron2-msra"],
    r"/ImageNetPretrained/FAIR/R-": PREPROCESSING["detectron2-fair"],
    r"^detectron2://.*/FAIR/X-": PREPROCESSING["detectron2-fair-resnext"],
    ZOO_DETECTOR + r"[^/]*_R_(50|101)_": PREPROCESSING["detectron2-msra"],
    ZOO_DETECTOR + r"[^/]*_X_101_": PREPROCESSING["detectron2-fair-resnext"],
}


def check_model(
    cfg: CfgNode, start: LazyCheckpoint, report: CheckReport, *, eval_only: bool
) -> nn.Module | None:
    """Check components, norms and frozen layers.

    Returns the model on the meta device, None if it cannot be built.
    """
    from_scratch = not start.address
    freeze_at = cfg.MODEL.BACKBONE.FREEZE_AT
    if from_scratch and freeze_at > 0 and not eval_only:
        report.errors.append(
            f"MODEL.BACKBONE.FREEZE_AT ({freeze_at}): without MODEL.WEIGHTS the frozen layers keep random values. "
            "Fix: set MODEL.BACKBONE.FREEZE_AT 0, or give MODEL.WEIGHTS."
        )

    channels = 1 if cfg.INPUT.FORMAT == "L" else 3
    if len(cfg.MODEL.PIXEL_MEAN) != channels:
        report.warnings.append(
            f"MODEL.PIXEL_MEAN ({len(cfg.MODEL.PIXEL_MEAN)} values): images of INPUT.FORMAT {cfg.INPUT.FORMAT} have "
            f"{channels} channels. Fix: give as many values, unless an own build_train_loader gives other images."
        )

    report.errors += unread_keys(cfg)
    try:
        model = build_checked_model(cfg, "meta")
    except ConfigError as error:
        report.errors.append(str(error))
        return None

    if not eval_only:
        _check_frozen_norms(cfg, model, report, from_scratch)
        _check_batch_norms(cfg, model, report)
        _check_mixtures(cfg, model, report)
    return model


def _check_frozen_norms(
    cfg: CfgNode, model: nn.Module, report: CheckReport, from_scratch: bool
) -> None:
    frozen = [
        name for name, module in model.named_modules() if isinstance(module, _FROZEN)
    ]
    # with FREEZE_AT it is reported already
    if from_scratch and frozen and cfg.MODEL.BACKBONE.FREEZE_AT == 0:
        report.errors.append(
            f"{_norm_keys(cfg, model, frozen)}: {len(frozen)} layers have fixed statistics (first: "
            f"{_kind(model, frozen[0])} {frozen[0]}). "
            "Without MODEL.WEIGHTS they have no statistics and normalize nothing. Fix: set it to GN or GW, or give "
            "MODEL.WEIGHTS."
        )
        return

    bottom_up = ("backbone.bottom_up.", "backbone.res")
    new = [name for name in frozen if not name.startswith(bottom_up)]
    if new:
        report.warnings.append(
            f"{_norm_keys(cfg, model, new)}: {len(new)} layers have fixed statistics (first: "
            f"{_kind(model, new[0])} {new[0]}). ImageNet "
            "weights have no statistics for them. Fix: set it to GN or GW, unless MODEL.WEIGHTS is a whole detector."
        )


def _kind(model: nn.Module, layer: str) -> str:
    """Return the norm name of a layer, without options."""
    return str(norm_spec(model.get_submodule(layer))).partition(":")[0]


def _norm_keys(cfg: CfgNode, model: nn.Module, layers: Sequence[str]) -> str:
    """Name the config keys that gave layers their norm."""
    kinds = {_kind(model, name) for name in layers}
    keys = [
        key for key in NORM_KEYS if str(get_value(cfg, key)).partition(":")[0] in kinds
    ]
    return " and ".join(keys) or "NORM"


def _check_batch_norms(cfg: CfgNode, model: nn.Module, report: CheckReport) -> None:
    processes = comm.get_world_size()
    per_process = cfg.SOLVER.IMS_PER_BATCH // processes
    images = {}  # that a layer normalizes over
    for name, module in model.named_modules():
        has_statistics = getattr(module, "running_mean", None) is not None
        if has_statistics and not isinstance(module, _FROZEN):
            images[name] = per_process * (processes if is_synchronized(module) else 1)

    single = [name for name, count in images.items() if count == 1]
    if single:
        report.errors.append(
            f"SOLVER.IMS_PER_BATCH ({cfg.SOLVER.IMS_PER_BATCH} on {processes} processes): {len(single)} layers "
            f"normalize over a batch of one image (first: {single[0]}), whose statistics are noisy. Fix: set "
            f"{_norm_keys(cfg, model, single)} to GN or GW, give two or more images per process, or pass "
            "--ignore-preflight to train with it."
        )
    batches = cfg.SOLVER.ACCUMULATE
    if images and batches > 1:
        report.warnings.append(
            f"SOLVER.ACCUMULATE ({batches}): {len(images)} layers normalize each batch by itself (first: "
            f"{next(iter(images))}), not over the {batches} batches of an iteration. Fix: use GW, GN or FrozenBN, or "
            "raise SOLVER.IMS_PER_BATCH instead."
        )


def _check_mixtures(cfg: CfgNode, model: nn.Module, report: CheckReport) -> None:
    """Warn of mixed norms in frozen stages, whose next convolution cannot adapt to another input."""
    frozen = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, MixedNorm)
        and any(layer.mixture)
        and not layer.weight.requires_grad
    ]
    if frozen:
        report.warnings.append(
            f"MODEL.BACKBONE.FREEZE_AT ({cfg.MODEL.BACKBONE.FREEZE_AT}): {len(frozen)} layers mix in the image's "
            f"statistics (first: {frozen[0]}), but the convolutions after them are frozen and cannot adapt. Fix: set "
            "MODEL.BACKBONE.FREEZE_AT 0."
        )


def check_start_weights(
    cfg: CfgNode,
    start: LazyCheckpoint,
    model: nn.Module | None,
    report: CheckReport,
    *,
    eval_only: bool,
    allow_partial: bool,
) -> None:
    """Check that the start weights fit the preprocessing, the config and, unless None, the model."""
    key = "--resume" if start.resumed else "MODEL.WEIGHTS"
    what = f"{key} ('{start.address}')"
    if start.error and not start.resumed:
        report.errors.append(str(start.error))
    report.errors += preprocessing_errors(cfg, _expected_preprocessing(start), what)

    weights = start.opened
    if weights is None:
        return
    if eval_only or not start.resumed:  # a resumed training warns of all keys
        report.warnings += model_warnings(cfg, weights, what)
    if model is None:
        return
    if start.resumed:
        _check_resumed(weights, model, report)
    else:
        _check_norms(cfg, weights, model, report, allow_partial)


def _expected_preprocessing(start: LazyCheckpoint) -> Preprocessing | None:
    """Return the preprocessing that weights record, or that their address tells; None if unknown."""
    recorded = expected_preprocessing(start.opened) if start.opened else None
    if recorded or start.resumed:
        return recorded
    for pattern, preprocessing in _PREPROCESSING.items():
        if re.search(pattern, start.address):
            return preprocessing
    return None


def _check_resumed(
    checkpoint: Checkpoint, model: nn.Module, report: CheckReport
) -> None:
    """Refuse to resume the checkpoint of another detector."""
    theirs = {name: value.shape for name, value in checkpoint.tensors.items()}
    ours = {name: value.shape for name, value in model.state_dict().items()}
    differences = [
        name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)
    ]
    differences += norm_differences(checkpoint, model, resumed=True)
    if differences:
        config = shlex.quote(config_beside(checkpoint.path))
        report.errors.append(
            f"--resume ('{checkpoint.path}'): a checkpoint of another detector: {summarize_names(differences)} differ. "
            f"Fix: continue with --config-file {config}. To start another run from these "
            "weights, leave out --resume and set MODEL.WEIGHTS and another OUTPUT_DIR."
        )


def _check_norms(
    cfg: CfgNode,
    weights: Checkpoint,
    model: nn.Module,
    report: CheckReport,
    allow_partial: bool,
) -> None:
    """Refuse weights of other norms; with ``allow_partial``, only where they would never be trained."""
    differences = norm_differences(weights, model)
    if differences and not allow_partial:
        report.errors.append(str(norm_mismatch(weights.address, differences)))
        return

    frozen = {
        name.rpartition(".")[0]
        for name, tensor in model.named_parameters()
        if not tensor.requires_grad
    }

    layers = {text.partition(" ")[0] for text in differences}
    untrained = sorted(frozen & layers)
    if untrained:
        report.errors.append(
            f"MODEL.BACKBONE.FREEZE_AT ({cfg.MODEL.BACKBONE.FREEZE_AT}): {len(untrained)} frozen layers were trained "
            f"with another norm ({summarize_names(untrained)}). Fix: set MODEL.BACKBONE.FREEZE_AT 0, or give weights "
            "of these norms."
        )
