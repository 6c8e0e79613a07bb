"""Whether the model can be built, and whether its normalisation can work in this run."""

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.layers.batch_norm import NaiveSyncBatchNorm
from detectron2.modeling import build_model
from detectron2.utils import comm
from torch import nn

from .findings import Findings

_NORM_KEYS = {
    ".fpn_": "MODEL.FPN.NORM",
    "backbone.": "MODEL.RESNETS.NORM",
    ".box_head": "MODEL.ROI_BOX_HEAD.NORM",
    ".mask_head": "MODEL.ROI_MASK_HEAD.NORM",
}


def check_model(cfg: CfgNode, findings: Findings, *, eval_only: bool, from_scratch: bool) -> None:
    """Adds what is wrong with the model: components, norms, frozen layers.

    Args:
        cfg: the config.
        findings: where problems go.
        eval_only: nothing is going to be trained.
        from_scratch: the run starts from random values.
    """
    freeze_at = cfg.MODEL.BACKBONE.FREEZE_AT
    if from_scratch and freeze_at > 0 and not eval_only:
        findings.problems.append(
            f"MODEL.BACKBONE.FREEZE_AT is {freeze_at} and MODEL.WEIGHTS is empty, so the first layers would stay "
            "at their random values. Set MODEL.BACKBONE.FREEZE_AT 0, or give MODEL.WEIGHTS."
        )
    try:
        model = _build_shapes(cfg)
    except (ValueError, KeyError, AssertionError, TypeError, ImportError) as error:
        said = error.args[0] if error.args else f"{type(error).__name__} without a message"
        findings.problems.append(f"The model cannot be built: {said}")
        return
    if not eval_only:
        _check_frozen_norms(cfg, model, findings, from_scratch)
        _check_batch_norms(cfg, model, findings)


def _build_shapes(cfg: CfgNode) -> nn.Module:
    """Builds the model without its numbers, which takes no memory and little time."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        return build_model(cfg)


def _check_frozen_norms(cfg: CfgNode, model: nn.Module, findings: Findings, from_scratch: bool) -> None:
    frozen: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FrozenBatchNorm2d):
            key = next((key for part, key in _NORM_KEYS.items() if part in name), "its NORM")
            frozen.setdefault(key, []).append(name)
    resnets = cfg.MODEL.RESNETS
    if "FrozenBN" not in (resnets.NORM, resnets.get("WHITEN_NORM")):
        frozen.pop("MODEL.RESNETS.NORM", None)  # these come from FREEZE_AT, which is checked by itself
    for key, names in frozen.items():
        layers = f"{len(names)} layers have FrozenBN (the first is {names[0]})"
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
    per_process = cfg.SOLVER.IMS_PER_BATCH // processes
    alone = []
    for name, module in model.named_modules():
        if isinstance(module, FrozenBatchNorm2d) or getattr(module, "running_mean", None) is None:
            continue  # a layer that normalises over the batch keeps its mean under this name
        in_sync = isinstance(module, (nn.SyncBatchNorm, NaiveSyncBatchNorm)) or getattr(module, "sync", False)
        if per_process * (processes if in_sync else 1) <= 1:
            alone.append(name)
    if alone:
        findings.problems.append(
            f"{len(alone)} layers normalise over a batch of one image (the first is {alone[0]}), and such "
            f"statistics are too noisy to train with. Set SOLVER.IMS_PER_BATCH {2 * processes} or more, the norm "
            "to SyncBN in a run of several GPUs, or to GW or GN, which need no batch."
        )
