"""Check that the model can be built and its norms can work."""

import os
from collections.abc import Iterable
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils import comm
from torch import nn

from ..analysis.norm_shapes import NormShape, norm_shapes
from ..checkpoint import Checkpoint, StartWeights, norm_differences
from ..errors import ConfigError, summarize_names
from ..layers import BatchWhitening2d, FrozenBatchWhitening2d
from ..modeling.build import build_checked_model
from ..modeling.norm_keys import NORM_KEYS, unread_keys
from ..norms.norm_listing import is_synchronized
from .findings import Findings

# part of a layer name -> key of its norm
_KEYS_BY_LAYER = {
    ".fpn_": "MODEL.FPN.NORM",
    "backbone.": "MODEL.RESNETS.NORM",
    ".box_head": "MODEL.ROI_BOX_HEAD.NORM",
    ".mask_head": "MODEL.ROI_MASK_HEAD.NORM",
    ".res5": "MODEL.RESNETS.NORM",
    "sem_seg_head.": "MODEL.SEM_SEG_HEAD.NORM",
    "_subnet.": "MODEL.RETINANET.NORM",
}
_FROZEN = (FrozenBatchNorm2d, FrozenBatchWhitening2d)
# Source: Group Whitening, Figure 1, and its supplement, Figure 5: small batches
_FEW_IMAGES = 4
# two seconds or more on two CPU cores, 10 ms on a GPU; the published settings stay below a fifth of it
_EXPENSIVE = 1e11
_REMEDIES = {"GW": "fewer groups", "GN": "fewer groups", "BW": "a smaller channels= of BW"}


def check_model(cfg: CfgNode, start: StartWeights, findings: Findings, *, eval_only: bool) -> nn.Module | None:
    """Check the components, norms and frozen layers of the model.

    Args:
        cfg: the config.
        start: the weights that the run starts from.
        findings: problems and warnings are added.
        eval_only: the run evaluates only.

    Returns:
        The model on the meta device, whose norms compute nothing; None if it cannot be built.
    """
    from_scratch = not start.address
    freeze_at = cfg.MODEL.BACKBONE.FREEZE_AT
    if from_scratch and freeze_at > 0 and not eval_only:
        findings.problems.append(
            f"MODEL.BACKBONE.FREEZE_AT ({freeze_at}): without MODEL.WEIGHTS the frozen layers keep random values. "
            "Fix: set MODEL.BACKBONE.FREEZE_AT 0, or give MODEL.WEIGHTS."
        )
    model, shapes = _build_and_trace(cfg, findings, trace=not eval_only)
    if model is None:
        return None
    if start.resumed and start.opened:
        _check_resumed(start.opened, model, findings)
    if not eval_only:
        _check_frozen_norms(cfg, model, findings, from_scratch)
        _check_batch_norms(cfg, model, findings)
        _check_feasibility(shapes.values(), findings)
        _check_solver_cost(shapes.values(), findings)
        _check_batch_whitening(cfg, model, shapes, findings)
    return model


def _build_and_trace(cfg: CfgNode, findings: Findings, trace: bool) -> tuple[nn.Module | None, dict[str, NormShape]]:
    """Build the model on the meta device and perhaps trace its norms.

    With ``trace`` the input shapes of the norms are found for the smallest square images.

    Returns:
        The model, whose norms compute nothing after tracing, or None if it cannot be built; the shapes by layer name.
    """
    try:
        model = build_checked_model(cfg, "meta")
    except ConfigError as error:
        findings.problems += [str(error), *unread_keys(cfg)]
        return None, {}
    findings.problems += unread_keys(cfg)
    if not trace or not min(cfg.INPUT.MIN_SIZE_TRAIN):  # images keep their unknown size
        return model, {}
    side, processes = min(cfg.INPUT.MIN_SIZE_TRAIN), comm.get_world_size()
    images = max(1, cfg.SOLVER.IMS_PER_BATCH // processes)
    try:
        return model, {row.layer: row for row in norm_shapes(cfg, side, side, images, processes=processes, model=model)}
    except Exception as error:  # custom components may raise anything
        findings.warnings.append(
            "MODEL: not checked whether the norms have enough values: the shapes cannot be traced on the meta device: "
            f"{type(error).__name__}: {error}. Fix: let custom components accept meta tensors, or check it yourself."
        )
        return model, {}


def _check_resumed(checkpoint: Checkpoint, model: nn.Module, findings: Findings) -> None:
    """Check that a resumed checkpoint belongs to the same detector.

    Args:
        checkpoint: the checkpoint to continue from.
        model: the detector of the config; only shapes and norms are used.
        findings: a problem is added.
    """
    shapes = {name: tuple(value.shape) for name, value in checkpoint.tensors.items()}
    wanted: dict[str, Any] = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    differences = {
        "only in the checkpoint": [name for name in shapes if name not in wanted],
        "only in the detector of this config": [name for name in wanted if name not in shapes],
        "of another shape": [
            f"{name} {shapes[name]} in the checkpoint, {shape} here"
            for name, shape in wanted.items()
            if name in shapes and shapes[name] != shape
        ],
    }
    found = [f"{len(names)} tensors {kind} ({summarize_names(names)})" for kind, names in differences.items() if names]
    if norms := norm_differences(checkpoint, model):
        found.append(f"{len(norms)} norms differ ({summarize_names(norms)})")
    if found:
        config = os.path.join(os.path.dirname(checkpoint.path), "config.yaml")
        findings.problems.append(
            f"--resume ('{checkpoint.path}'): a checkpoint of another detector: {'; '.join(found)}. Fix: continue with "
            f"--config-file {config}, or set all MODEL keys as in that run (the keys of norms are "
            f"{', '.join(NORM_KEYS)}). To start another run from these weights, leave out --resume and set "
            "MODEL.WEIGHTS and another OUTPUT_DIR."
        )


def _check_frozen_norms(cfg: CfgNode, model: nn.Module, findings: Findings, from_scratch: bool) -> None:
    frozen: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, _FROZEN):
            key = next((key for part, key in _KEYS_BY_LAYER.items() if part in name), "its NORM")
            frozen.setdefault(key, []).append(name)
    resnets = cfg.MODEL.RESNETS
    if not any(str(norm).startswith("Frozen") for norm in (resnets.NORM, resnets.get("WHITEN_NORM"))):
        frozen.pop("MODEL.RESNETS.NORM", None)  # these come from FREEZE_AT, which has its own check
    for key, names in frozen.items():
        layers = f"{len(names)} layers are FrozenBN or FrozenBW (first: {names[0]})"
        if from_scratch:
            findings.problems.append(
                f"{key}: {layers}, and without MODEL.WEIGHTS they have no statistics and normalize nothing. Fix: set "
                f"{key} to BN, GN or GW, or give MODEL.WEIGHTS."
            )
        elif key != "MODEL.RESNETS.NORM":
            findings.warnings.append(
                f"{key}: {layers}. ImageNet weights have no statistics for them. Fix: set {key} to GN or GW, unless "
                "MODEL.WEIGHTS are those of a whole detector."
            )


def _check_batch_norms(cfg: CfgNode, model: nn.Module, findings: Findings) -> None:
    images = {
        name: _images_per_statistic(cfg, module)
        for name, module in model.named_modules()
        if not isinstance(module, _FROZEN)
        and getattr(module, "running_mean", None) is not None  # a layer that normalizes over the batch
    }
    if single := [name for name, count in images.items() if count == 1]:
        scaled, wanted = "", f"{2 * comm.get_world_size()} or more"
        if cfg.SOLVER.REFERENCE_WORLD_SIZE:  # the trainer, and so this config, scales by it
            scaled = ", scaled by SOLVER.REFERENCE_WORLD_SIZE"
            wanted = "to at least 2 times SOLVER.REFERENCE_WORLD_SIZE"
        findings.problems.append(
            f"SOLVER.IMS_PER_BATCH ({cfg.SOLVER.IMS_PER_BATCH}{scaled}): {len(single)} layers normalize over a batch "
            f"of one image (first: {single[0]}), whose statistics are too noisy to train with. Fix: set "
            f"SOLVER.IMS_PER_BATCH {wanted}, the norm to SyncBN on several GPUs, or to GW or GN."
        )
    if images and (batches := cfg.SOLVER.ACCUMULATE) > 1:
        name, count = next(iter(images.items()))
        findings.warnings.append(
            f"SOLVER.ACCUMULATE ({batches}): {len(images)} layers normalize over each batch alone (first: {name}, over "
            f"{count} images), not over the {batches} batches of an iteration. Fix: use GW, GN or FrozenBN, or raise "
            "SOLVER.IMS_PER_BATCH instead."
        )
    of_torch = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if of_torch and cfg.MODEL.DEVICE == "cpu" and comm.get_world_size() > 1:
        findings.problems.append(
            f"MODEL.DEVICE ('cpu'): {len(of_torch)} layers are torch's SyncBN (first: {of_torch[0]}), which in several "
            "processes needs GPUs. Fix: set the norm to naiveSyncBN, BW:sync=true, GN or GW."
        )


def _check_batch_whitening(cfg: CfgNode, model: nn.Module, shapes: dict[str, NormShape], findings: Findings) -> None:
    few = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, BatchWhitening2d)
        and not isinstance(module, FrozenBatchWhitening2d)
        and module.solver.name != "standardize"
        and 1 < _images_per_statistic(cfg, module) <= _FEW_IMAGES
    ]
    if few:
        columns = {name: row.constraints.columns for name, row in shapes.items() if row.constraints}
        name, worst = max(few, key=lambda item: (item[1].channels_per_group, -columns.get(item[0], 0)))
        d, images = worst.channels_per_group, _images_per_statistic(cfg, worst)
        smallest = f" (m = {columns.get(name)} for the smallest images; nearby positions are correlated)"
        findings.warnings.append(
            f"{len(few)} layers whiten over a batch of {images} images (e.g. {name}). Whitening d = {d} channels over "
            f"m columns, images times positions{smallest if name in columns else ''}, has no solution unless m exceeds "
            f"(d + 3) / 2 = {(d + 3) / 2:g} and is stable from m = d. Evaluation needs d (d + 1) / 2 = "
            f"{d * (d + 1) // 2} numbers, estimated from such batches. Fix: use more images per process, sync=true "
            "with several processes, a smaller channels=, or GW, which needs no batch."
        )


def _images_per_statistic(cfg: CfgNode, layer: nn.Module) -> int:
    """Count the images over which a batch normalization layer computes its statistics."""
    processes = comm.get_world_size()
    return cfg.SOLVER.IMS_PER_BATCH // processes * (processes if is_synchronized(layer) else 1)


def _check_feasibility(rows: Iterable[NormShape], findings: Findings) -> None:
    impossible = [(row, row.constraints) for row in rows if row.constraints and not row.constraints.feasible]
    if impossible:
        first, constraints = impossible[0]
        kinds = [row.spec.partition(":")[0] for row, _ in impossible]
        remedies = dict.fromkeys(_REMEDIES[kind] for kind in kinds if kind in _REMEDIES)
        findings.warnings.append(
            f"INPUT.MIN_SIZE_TRAIN: {len(impossible)} layers have too few values to normalize in square images of the "
            f"smallest size. The first is {first.layer} ({first.spec}), {constraints.remark}. Fix: use "
            f"{', '.join([*remedies, 'or larger images']) if remedies else 'larger images'}."
        )


def _check_solver_cost(rows: Iterable[NormShape], findings: Findings) -> None:
    expensive = [row for row in rows if row.solver_flops >= _EXPENSIVE]
    if expensive:
        worst = max(expensive, key=lambda row: row.solver_flops)
        findings.warnings.append(
            f"{worst.layer} ({worst.spec}): its solver needs about {worst.solver_flops:.1e} operations per training "
            f"batch for an input of {worst.shape}, and {len(expensive)} layers need {_EXPENSIVE:.0e} or more. The cost "
            "grows with the third power of groups= (GW) or channels= (BW). Fix: use 64, the published number."
        )
