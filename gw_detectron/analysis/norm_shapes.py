"""What every normalisation layer of a detector gets to see: shapes without numbers, and the constraints from them."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.layers.batch_norm import NaiveSyncBatchNorm
from detectron2.modeling import build_model
from torch import Tensor, nn

from ..layers import FrozenBatchWhitening2d, GroupWhitening2d
from ..modeling.norm import norm_spec
from ..modeling.norm_keys import misplaced_norms
from .feasibility import Constraints, batch_constraints, group_constraints


class NormShape(NamedTuple):
    """One normalisation layer and its input.

    Args:
        layer: its name in the model.
        spec: its norm name.
        shape: (N, C, *spatial) of the smallest input it gets in one process; None if no shape reached it.
        constraints: what it puts on its output; None if it was not reached, or if its statistics are fixed.
    """

    layer: str
    spec: str
    shape: tuple[int, ...] | None
    constraints: Constraints | None


def build_shapes(cfg: CfgNode) -> nn.Module:
    """Builds the detector of a config without its numbers, which takes no memory and little time.

    Raises:
        ValueError: a component of Detectron2 that knows its own norms only has been given another.
        Other errors: what Detectron2 raises for components and sizes that do not exist or fit.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    try:
        with torch.device("meta"):
            return build_model(cfg)
    except KeyError as error:
        misplaced = " ".join(misplaced_norms(cfg, error.args[0] if error.args else None))
        if misplaced:
            raise ValueError(misplaced) from error
        raise


def norm_shapes(
    cfg: CfgNode, height: int, width: int, images: int, *, processes: int = 1, model: Any = None
) -> list[NormShape]:
    """Follows the shapes of a batch in training through a detector, to every normalisation layer it has.

    Heads on regions get the ``ROI_HEADS.BATCH_SIZE_PER_IMAGE`` regions of each image, those of masks and key points
    the share of them that may be foreground.

    Args:
        cfg: the config.
        height, width: of the images in pixels; rounded up to what the backbone takes.
        images: images in each process.
        processes: over how many processes the batch norms that are in sync see the batch.
        model: the model of the config as :func:`build_shapes` makes it; it is of no use afterwards.

    Returns:
        The layers in the order of the model's modules.

    Raises:
        ValueError: a number is not positive.
    """
    for name, value in (("height", height), ("width", width), ("images", images), ("processes", processes)):
        if value < 1:
            raise ValueError(f"{name} is {value} and has to be positive")
    model = model or build_shapes(cfg)
    seen: dict[str, tuple[int, ...]] = {}
    norms = dict(_norm_layers(model))
    for name, layer in norms.items():
        # the layer itself is left out: its input tells all, and solvers may want numbers
        layer.forward = functools.partial(_record, seen, name)
    divisor = max(1, model.backbone.size_divisibility)
    sides = (-(-side // divisor) * divisor for side in (height, width))
    channels = len(cfg.MODEL.PIXEL_MEAN)
    with torch.no_grad(), torch.device("meta"):
        features = model.backbone(torch.empty(images, channels, *sides))
        for part, arguments in _heads(model, features, images, cfg):
            part(*arguments)
    return [
        NormShape(name, norm_spec(layer), seen.get(name), _constraints(layer, seen.get(name), processes))
        for name, layer in norms.items()
    ]


def _norm_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        try:
            norm_spec(module)
        except ValueError:
            continue
        yield name, module


def _record(seen: dict[str, tuple[int, ...]], name: str, x: Tensor) -> Tensor:
    if name not in seen or x.numel() < torch.Size(seen[name]).numel():
        seen[name] = tuple(x.shape)
    return x


def _heads(model: Any, features: dict[str, Tensor], images: int, cfg: CfgNode) -> Iterator[tuple[Any, tuple]]:
    """The parts behind the backbone that hold norms, and what they are called with."""
    dense: Any = getattr(model, "head", None)
    if _has_norms(dense):
        yield dense, ([features[name] for name in model.head_in_features],)
    rpn: Any = getattr(model, "proposal_generator", None)
    if _has_norms(rpn):
        yield rpn.rpn_head, ([features[name] for name in rpn.in_features],)
    roi_heads: Any = getattr(model, "roi_heads", None)
    if not _has_norms(roi_heads):
        return
    regions = images * cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE
    foreground = max(images, int(regions * cfg.MODEL.ROI_HEADS.POSITIVE_FRACTION))
    if hasattr(roi_heads, "res5"):  # of a backbone that ends at res4
        level = features[roi_heads.in_features[0]]
        shared = roi_heads.res5(level.new_empty(regions, level.shape[1], *roi_heads.pooler.output_size))
        if _has_norms(getattr(roi_heads, "mask_head", None)):
            yield roi_heads.mask_head.layers, (shared[:foreground],)
        return
    for kind, count in (("box", regions), ("mask", foreground), ("keypoint", foreground)):
        head = getattr(roi_heads, f"{kind}_head", None)
        if _has_norms(head):
            level = features[getattr(roi_heads, f"{kind}_in_features")[0]]
            size = getattr(roi_heads, f"{kind}_pooler").output_size
            for stage in head if isinstance(head, nn.ModuleList) else [head]:  # a cascade has several
                yield getattr(stage, "layers", stage), (level.new_empty(count, level.shape[1], *size),)


def _has_norms(part: Any) -> bool:
    return isinstance(part, nn.Module) and next(_norm_layers(part), None) is not None


def _constraints(layer: Any, shape: tuple[int, ...] | None, processes: int) -> Constraints | None:
    if shape is None or 0 in shape or isinstance(layer, (FrozenBatchNorm2d, FrozenBatchWhitening2d)):
        return None
    whitens = hasattr(layer, "solver") and layer.solver.name != "standardize"
    samples, channels = shape[:2]
    pixels = torch.Size(shape[2:]).numel()
    if isinstance(layer, (GroupWhitening2d, nn.GroupNorm)):
        return group_constraints(channels * pixels, samples, layer.num_groups, whitens)
    if getattr(layer, "running_mean", None) is not None:  # what normalises over the batch keeps its mean by this name
        in_sync = isinstance(layer, (nn.SyncBatchNorm, NaiveSyncBatchNorm)) or getattr(layer, "sync", False)
        together = samples * pixels * (processes if in_sync else 1)
        return batch_constraints(channels, together, layer.channels_per_group if whitens else 1)
    return group_constraints(channels, samples * pixels, 1, whiten=False)  # LN: one group at every pixel
