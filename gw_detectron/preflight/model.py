"""Whether the model can be built, and whether its normalisation can work in this run."""

from collections.abc import Iterable

from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.layers.batch_norm import NaiveSyncBatchNorm
from detectron2.utils import comm
from torch import nn

from ..analysis.norm_shapes import NormShape, build_shapes, norm_shapes
from ..layers import BatchWhitening2d, FrozenBatchWhitening2d
from ..modeling.norm_keys import unread_keys
from .findings import Findings
from .readable import read_problem
from .resumed import check_resumed
from .weights import Start

_NORM_KEYS = {
    ".fpn_": "MODEL.FPN.NORM",
    "backbone.": "MODEL.RESNETS.NORM",
    ".box_head": "MODEL.ROI_BOX_HEAD.NORM",
    ".mask_head": "MODEL.ROI_MASK_HEAD.NORM",
}
_FROZEN = (FrozenBatchNorm2d, FrozenBatchWhitening2d)
# Batches of so few images are the worst of Group Whitening, Figure 1, and of its supplement, Figure 5.
_FEW_IMAGES = 4
_REMEDIES = {"GW": "fewer groups", "GN": "fewer groups", "BW": "a smaller channels= of BW"}


def check_model(cfg: CfgNode, findings: Findings, *, eval_only: bool, start: Start) -> None:
    """Adds what is wrong with the model: components, norms, frozen layers.

    Args:
        cfg: the config.
        findings: where problems go.
        eval_only: nothing is going to be trained.
        start: the weights.
    """
    from_scratch = not start.file
    freeze_at = cfg.MODEL.BACKBONE.FREEZE_AT
    if from_scratch and freeze_at > 0 and not eval_only:
        findings.problems.append(
            f"MODEL.BACKBONE.FREEZE_AT is {freeze_at} and MODEL.WEIGHTS is empty, so the first layers would stay "
            "at their random values. Set MODEL.BACKBONE.FREEZE_AT 0, or give MODEL.WEIGHTS."
        )
    findings.problems += unread_keys(cfg)
    try:
        model = build_shapes(cfg)
    except (ValueError, KeyError, AssertionError, TypeError, ImportError) as error:
        said = error.args[0] if error.args else f"{type(error).__name__} without a message"
        findings.problems.append(f"The model cannot be built: {said}")
        return
    if start.resumed and not read_problem(start.file):
        check_resumed(start.file, model, findings)
    if not eval_only:
        _check_frozen_norms(cfg, model, findings, from_scratch)
        _check_batch_norms(cfg, model, findings)
        shapes = _shapes(cfg, model, findings)
        _check_constraints(shapes.values(), findings)
        _check_batch_whitening(cfg, model, shapes, findings)


def _check_frozen_norms(cfg: CfgNode, model: nn.Module, findings: Findings, from_scratch: bool) -> None:
    frozen: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, _FROZEN):
            key = next((key for part, key in _NORM_KEYS.items() if part in name), "its NORM")
            frozen.setdefault(key, []).append(name)
    resnets = cfg.MODEL.RESNETS
    if not any(str(norm).startswith("Frozen") for norm in (resnets.NORM, resnets.get("WHITEN_NORM"))):
        frozen.pop("MODEL.RESNETS.NORM", None)  # these come from FREEZE_AT, which is checked by itself
    for key, names in frozen.items():
        layers = f"{len(names)} layers have FrozenBN or FrozenBW (the first is {names[0]})"
        if from_scratch:
            findings.problems.append(
                f"{layers} and MODEL.WEIGHTS is empty: without statistics to load that is no normalisation. Set "
                f"{key} to BN, GN or GW, or give MODEL.WEIGHTS."
            )
        elif key != "MODEL.RESNETS.NORM":
            findings.warnings.append(
                f"{layers}. ImageNet weights have no statistics for them, so they normalise only if the weights "
                f"are those of a detector; otherwise set {key} to GN or GW."
            )


def _check_batch_norms(cfg: CfgNode, model: nn.Module, findings: Findings) -> None:
    processes = comm.get_world_size()
    alone = []
    for name, module in model.named_modules():
        if isinstance(module, _FROZEN) or getattr(module, "running_mean", None) is None:
            continue  # a layer that normalises over the batch keeps its mean under this name
        if _images_together(cfg, module) == 1:  # none at all is said elsewhere
            alone.append(name)
    if alone:
        findings.problems.append(
            f"{len(alone)} layers normalise over a batch of one image (the first is {alone[0]}), and such "
            f"statistics are too noisy to train with. Set SOLVER.IMS_PER_BATCH {2 * processes} or more, the norm "
            "to SyncBN in a run of several GPUs, or to GW or GN, which need no batch."
        )


def _check_batch_whitening(cfg: CfgNode, model: nn.Module, shapes: dict[str, NormShape], findings: Findings) -> None:
    few = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, BatchWhitening2d)
        and not isinstance(module, FrozenBatchWhitening2d)
        and module.solver.name != "standardize"
        and 1 < _images_together(cfg, module) <= _FEW_IMAGES
    ]
    if few:
        columns = {name: row.constraints.columns for name, row in shapes.items() if row.constraints}
        name, worst = max(few, key=lambda item: (item[1].channels_per_group, -columns.get(item[0], 0)))
        d, images = worst.channels_per_group, _images_together(cfg, worst)
        here = ""
        if name in columns:
            here = f" (m = {columns[name]} for the smallest images, but positions in one image are much alike)"
        findings.warnings.append(
            f"{len(few)} layers whiten over a batch of {images} images (such as {name}). Whitening d = {d} channels "
            f"over m columns, images times positions{here}, has no solution unless m exceeds (d + 3) / 2 = "
            f"{(d + 3) / 2:g}, and is stable from m = d on; and evaluation needs d (d + 1) / 2 = {d * (d + 1) // 2} "
            "numbers, which are estimated from batches like these. Give each process more images, use sync=true in a "
            "run of several processes, a smaller channels=, or GW, which needs no batch."
        )


def _images_together(cfg: CfgNode, layer: nn.Module) -> int:
    """How many images a layer that normalises over the batch sees at a time."""
    processes = comm.get_world_size()
    in_sync = isinstance(layer, (nn.SyncBatchNorm, NaiveSyncBatchNorm)) or getattr(layer, "sync", False)
    return cfg.SOLVER.IMS_PER_BATCH // processes * (processes if in_sync else 1)


def _shapes(cfg: CfgNode, model: nn.Module, findings: Findings) -> dict[str, NormShape]:
    """Follows square images of the smallest size in training to all norms; leaves the model of no other use."""
    if not cfg.INPUT.MIN_SIZE_TRAIN:
        findings.problems.append(
            "INPUT.MIN_SIZE_TRAIN is empty, so images for training have no size. Set it to the lengths in pixels that "
            'their shorter side may have, such as "(800,)".'
        )
        return {}
    side = min(cfg.INPUT.MIN_SIZE_TRAIN)
    processes = comm.get_world_size()
    images = max(1, cfg.SOLVER.IMS_PER_BATCH // processes)
    try:
        rows = norm_shapes(cfg, side, side, images, processes=processes, model=model)
    except Exception as error:  # a part of the user's own may do anything
        findings.warnings.append(
            "Whether the norms have enough numbers to normalise was not checked, because the shapes of this model "
            f"cannot be followed without numbers: {type(error).__name__}: {error}"
        )
        return {}
    return {row.layer: row for row in rows}


def _check_constraints(rows: Iterable[NormShape], findings: Findings) -> None:
    impossible = [(row, row.constraints) for row in rows if row.constraints and not row.constraints.feasible]
    if impossible:
        first, constraints = impossible[0]
        kinds = [row.spec.partition(":")[0] for row, _ in impossible]
        remedies = dict.fromkeys(_REMEDIES[kind] for kind in kinds if kind in _REMEDIES)
        advice = ", ".join([*remedies, "or larger images"]) if remedies else "larger images"
        findings.warnings.append(
            f"{len(impossible)} layers cannot do what their norm asks for in square images of the smallest size in "
            f"INPUT.MIN_SIZE_TRAIN. The first is {first.layer} ({first.spec}), {constraints.remark}. Take "
            f"{advice}."
        )
