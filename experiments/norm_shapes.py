"""Trace the input shape of every norm layer without computing values."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from torch import Tensor, nn

from gw_detectron.layers import (
    BatchWhitening2d,
    FrozenBatchWhitening2d,
    GroupWhitening2d,
)
from gw_detectron.modeling.build import build_checked_model
from gw_detectron.norms.listing import norm_rows

from .feasibility import Constraints, batch_constraints, group_constraints


class NormShape(NamedTuple):
    """Norm layer and its input shape.

    Args:
        layer: its name in the model.
        spec: its norm name.
        shape: (N, C, *spatial) of its smallest input in one process; None if no input reached it.
        constraints: constraints on its output; None if no input reached it or its statistics are fixed.
    """

    layer: str
    spec: str
    shape: tuple[int, ...] | None
    constraints: Constraints | None


def norm_shapes(cfg: CfgNode, height: int, width: int, images: int) -> list[NormShape]:
    """Trace the input shape of every norm layer in training, in the order of the model's modules.

    Heads on regions get ``ROI_HEADS.BATCH_SIZE_PER_IMAGE`` regions per image; mask and keypoint heads get the fraction
    of them that can be foreground. Height and width are rounded up to the backbone's size divisibility.
    """
    model: Any = build_checked_model(cfg, "meta")
    shapes: dict[str, tuple[int, ...]] = {}
    rows = norm_rows(model)
    for row in rows:
        # skip the layer's own computation: its input is enough, and solvers may need values
        model.get_submodule(row.layer).forward = functools.partial(
            _record, shapes, row.layer
        )
    divisor = max(1, model.backbone.size_divisibility)
    sides = (-(-side // divisor) * divisor for side in (height, width))
    with torch.no_grad(), torch.device("meta"):
        features = model.backbone(
            torch.empty(images, len(cfg.MODEL.PIXEL_MEAN), *sides)
        )
        for part, arguments in _heads(model, features, images, cfg):
            part(*arguments)
    found = ((row, shapes.get(row.layer)) for row in rows)
    return [
        NormShape(
            row.layer,
            row.spec,
            shape,
            _constraints(model.get_submodule(row.layer), shape),
        )
        for row, shape in found
    ]


def _record(
    shapes: dict[str, tuple[int, ...]], name: str, x: Tensor, **_: Any
) -> Tensor:
    if name not in shapes or x.numel() < torch.Size(shapes[name]).numel():
        shapes[name] = tuple(x.shape)
    return x


def _heads(
    model: Any, features: dict[str, Tensor], images: int, cfg: CfgNode
) -> Iterator[tuple[Any, tuple]]:
    """Yield the heads that hold norm layers, with their inputs."""
    dense: Any = getattr(model, "head", None)
    if _has_norms(dense):
        yield dense, ([features[name] for name in model.head_in_features],)
    semantic: Any = getattr(model, "sem_seg_head", None)
    if _has_norms(semantic):
        yield semantic.layers, (features,)
    rpn: Any = getattr(model, "proposal_generator", None)
    if _has_norms(rpn):
        yield rpn.rpn_head, ([features[name] for name in rpn.in_features],)
    roi_heads: Any = getattr(model, "roi_heads", None)
    if not _has_norms(roi_heads):
        return
    regions = images * cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE
    foreground = max(images, int(regions * cfg.MODEL.ROI_HEADS.POSITIVE_FRACTION))
    if hasattr(roi_heads, "res5"):  # the backbone ends at res4
        level = features[roi_heads.in_features[0]]
        shared = roi_heads.res5(
            level.new_empty(regions, level.shape[1], *roi_heads.pooler.output_size)
        )
        if _has_norms(getattr(roi_heads, "mask_head", None)):
            yield roi_heads.mask_head.layers, (shared[:foreground],)
        return
    for kind, count in (
        ("box", regions),
        ("mask", foreground),
        ("keypoint", foreground),
    ):
        head = getattr(roi_heads, f"{kind}_head", None)
        if _has_norms(head):
            level = features[getattr(roi_heads, f"{kind}_in_features")[0]]
            size = getattr(roi_heads, f"{kind}_pooler").output_size
            for stage in (
                head if isinstance(head, nn.ModuleList) else [head]
            ):  # a cascade has several
                yield (
                    getattr(stage, "layers", stage),
                    (level.new_empty(count, level.shape[1], *size),),
                )


def _has_norms(part: Any) -> bool:
    return isinstance(part, nn.Module) and bool(norm_rows(part))


def _constraints(layer: Any, shape: tuple[int, ...] | None) -> Constraints | None:
    if (
        shape is None
        or 0 in shape
        or isinstance(layer, (FrozenBatchNorm2d, FrozenBatchWhitening2d))
    ):
        return None
    samples, channels = shape[:2]
    pixels = torch.Size(shape[2:]).numel()
    whitens = (
        isinstance(layer, (GroupWhitening2d, BatchWhitening2d))
        and layer.solver.name != "standardize"
    )
    if isinstance(layer, (GroupWhitening2d, nn.GroupNorm)):
        return group_constraints(channels * pixels, samples, layer.num_groups, whitens)
    if (
        getattr(layer, "running_mean", None) is not None
    ):  # every layer that normalizes over the batch has one
        return batch_constraints(
            channels, samples * pixels, layer.channels_per_group if whitens else 1
        )
    return group_constraints(
        channels, samples * pixels, 1, whiten=False
    )  # LN: one group per pixel
