"""Region pooling from a feature pyramid as a function of tensors."""

from collections.abc import Sequence

import torch
from detectron2.modeling.poolers import ROIPooler
from torch import Tensor


def assign_levels(pooler: ROIPooler, boxes: Tensor) -> Tensor:
    r"""Assign boxes, (M, 4), to the levels of a pooler.

    .. math:: l = \lfloor l_0 + \log_2(\sqrt{wh} / s_0) \rfloor

    Comparing sides with :math:`s_0 2^{l - l_0}` gives the same without a logarithm, which runtimes round differently.

    Returns:
        Index of the level, 0 for the finest one, (M).

    Source: Feature Pyramid Networks, equation (1).
    """
    side = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    levels = range(pooler.min_level + 1, pooler.max_level + 1)
    steps = [pooler.canonical_box_size * 2.0 ** (level - pooler.canonical_level) for level in levels]
    return (side[:, None] >= side.new_tensor(steps)).sum(1)


def pool(pooler: ROIPooler, features: Sequence[Tensor], rois: Tensor) -> Tensor:
    """Pool regions from the level of their size.

    Args:
        pooler: its ROIAlign layers are used.
        features: one map per level, (N, C, H_l, W_l).
        rois: index of the image, x0, y0, x1, y1, (M, 5).

    Returns:
        (M, C, P, P).
    """
    level = assign_levels(pooler, rois[:, 1:])
    pooled = rois.new_zeros(rois.shape[0], features[0].shape[1], *pooler.output_size)
    for index, (feature, align) in enumerate(zip(features, pooler.level_poolers, strict=True)):
        rows = (level == index).nonzero()[:, 0]
        pooled = pooled.index_put((rows,), align(feature, rois[rows]))
    return pooled


def image_rois(boxes: Tensor) -> Tensor:
    """Put the index of the image before each box, (N, M, 4) -> (N * M, 5)."""
    images = torch.arange(boxes.shape[0], device=boxes.device, dtype=boxes.dtype)[:, None, None]
    return torch.cat((images.expand(-1, boxes.shape[1], -1), boxes), 2).flatten(0, 1)
