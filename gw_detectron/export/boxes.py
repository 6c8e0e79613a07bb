"""Boxes as plain tensors of fixed shapes: anchors, clipping, suppression and selection.

N: images, M: boxes of an image, K: selected boxes. A score of -inf marks a row without a box.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from torch import Tensor
from torchvision.ops import nms

NO_BOX = -math.inf


def grid_anchors(generator: DefaultAnchorGenerator, features: Sequence[Tensor]) -> list[Tensor]:
    """Place the anchors of a generator on feature maps, (N, C, H, W); return one (H * W * A, 4) per level."""
    anchors = []
    for feature, stride, cell in zip(features, generator.strides, generator.cell_anchors, strict=True):
        y, x = ((torch.arange(side, device=cell.device) + generator.offset) * stride for side in feature.shape[-2:])
        y, x = y[:, None].expand(-1, feature.shape[-1]), x.expand(feature.shape[-2], -1)
        anchors.append((torch.stack((x, y, x, y), 2)[:, :, None] + cell).reshape(-1, 4))
    return anchors


def per_anchor(prediction: Tensor, values: int) -> Tensor:
    """Reorder a dense prediction, (N, A * values, H, W) -> (N, H * W * A, values)."""
    return prediction.unflatten(1, (-1, values)).permute(0, 3, 4, 1, 2).flatten(1, 3)


def clip(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Clip boxes, (N, M, 4), to images of heights and widths ``sizes``, (N, 2)."""
    limits = sizes.flip(1).repeat(1, 2)[:, None].to(boxes.dtype)
    return torch.minimum(boxes.clamp(min=0), limits)


def take(values: Tensor, index: Tensor) -> Tensor:
    """Take rows of every image: (N, M, D) and (N, K) -> (N, K, D)."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def decode(transform: Box2BoxTransform, prediction: Tensor, anchors: Tensor, index: Tensor) -> Tensor:
    """Decode the deltas, (N, A * 4, H, W), of the selected anchors, (N, K), of a level to boxes, (N, K, 4)."""
    deltas = take(per_anchor(prediction, 4), index)
    return transform.apply_deltas(deltas.flatten(0, 1), anchors[index].flatten(0, 1)).view_as(deltas)


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the K highest scores of every image, (N, M), in descending order; also return their indices below M.

    Where M is smaller than K, scores of -inf are appended.
    """
    selected, index = F.pad(scores, (0, count), value=NO_BOX).topk(count)
    return selected, index.clamp(max=scores.shape[1] - 1)


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, num_groups: int, threshold: float) -> Tensor:
    r"""Apply NMS inside every image and group; return the scores with -inf for suppressed boxes.

    One call of NMS handles all images and groups: each pair has a cell of its own on a grid. :math:`\sqrt{G}` columns
    keep coordinates small: float32 rounds those of 80 classes of 1333 px in one row to 0.008 px, here to 0.001 px.

    Args:
        boxes: finite, (N, M, 4).
        scores: (N, M), -inf for rows without a box.
        groups: class or feature level, 0 to G - 1, (N, M) or (M).
        num_groups: G.
        threshold: of the IoU.
    """
    columns = math.ceil(math.sqrt(num_groups))
    images = torch.arange(boxes.shape[0], device=boxes.device)[:, None]
    x, y = torch.broadcast_tensors(groups % columns, images * columns + groups // columns)
    cell = boxes.max() - boxes.min() + 1
    apart = (boxes + cell * torch.stack((x, y, x, y), 2)).flatten(0, 1)
    # torch.export assumes at least two kept boxes: row 0 is a box of score -inf, taken twice
    flat = F.pad(scores.flatten(), (1, 0), value=NO_BOX)
    candidates = rows_with_dummies(scores > NO_BOX)
    kept = candidates[nms(F.pad(apart, (0, 0, 1, 0))[candidates], flat[candidates], threshold)]
    return torch.full_like(flat, NO_BOX).index_put((kept,), flat[kept])[1:].view_as(scores)


def rows_with_dummies(mask: Tensor) -> Tensor:
    """Return 0, 0 and the indices of true values, counted from 1: torch.export assumes at least two rows."""
    return F.pad(F.pad(mask.flatten(), (1, 0), value=True).nonzero()[:, 0], (1, 0))
