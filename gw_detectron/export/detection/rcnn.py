"""Faster and Mask R-CNN as a function of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN
from detectron2.modeling.roi_heads import StandardROIHeads
from torch import Tensor

from .boxes import NO_BOX, clip, decode, grid_anchors, per_anchor, rows_with_dummies, suppress, take, top
from .program import DetectorProgram


class RCNNProgram(DetectorProgram):
    """Faster or Mask R-CNN with an FPN; see :class:`.DetectorProgram`."""

    ROWS = "test_topk_per_image"

    @property
    def head(self) -> Any:
        return self.model.roi_heads.box_predictor

    def detect(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        heads = self.model.roi_heads
        proposals, real = _propose(self.model.proposal_generator, features, sizes)
        boxes, scores = _predict(heads, features, proposals)
        finite = boxes.isfinite().flatten(2).all(2) & scores.isfinite().all(2)
        boxes = clip(torch.where(finite[:, :, None, None], boxes, 0).flatten(1, 2), sizes).view_as(boxes)
        scores = scores[:, :, :-1]  # without the background
        predictor = heads.box_predictor
        wanted = (finite & real)[:, :, None] & (scores > self.score_threshold)
        scores = torch.where(wanted, scores, NO_BOX).flatten(1)
        boxes = boxes.expand(-1, -1, predictor.num_classes, -1).flatten(1, 2)  # for class-agnostic boxes
        classes = torch.arange(predictor.num_classes, device=scores.device).repeat(proposals.shape[1])
        scores = suppress(boxes, scores, classes, predictor.num_classes, predictor.test_nms_thresh)
        boxes, scores, classes, count = self.select(boxes, scores, classes.expand_as(scores))
        if not heads.mask_on:
            return boxes, scores, classes, count
        return boxes, scores, classes, _masks(heads, features, boxes, classes), count


def _propose(rpn: RPN, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Propose boxes, as Detectron2's ``find_top_rpn_proposals`` does in evaluation.

    Args:
        rpn: its head, anchors and thresholds are used.
        features: level name -> feature map.
        sizes: heights and widths of the images, (N, 2).

    Returns:
        Boxes, (N, R, 4), and True for the rows that hold one, (N, R); R is ``RPN.POST_NMS_TOPK_TEST``.
    """
    maps = [features[name] for name in rpn.in_features]
    predictions = zip(*rpn.rpn_head(maps), grid_anchors(rpn.anchor_generator, maps), strict=True)
    all_boxes, all_scores, all_levels = [], [], []
    for level, (logits, deltas, anchors) in enumerate(predictions):
        scores, index = top(per_anchor(logits, 1)[:, :, 0], rpn.pre_nms_topk[False])
        all_boxes.append(decode(rpn.box2box_transform, deltas, anchors, index))
        all_scores.append(scores)
        all_levels.append(torch.full_like(index[0], level))
    boxes, scores, levels = torch.cat(all_boxes, 1), torch.cat(all_scores, 1), torch.cat(all_levels)

    finite = boxes.isfinite().all(2) & scores.isfinite()
    boxes = clip(torch.where(finite[:, :, None], boxes, 0), sizes)
    large = (boxes[:, :, 2:] - boxes[:, :, :2] > rpn.min_box_size).all(2)
    scores = torch.where(finite & large, scores, NO_BOX)
    scores = suppress(boxes, scores, levels, len(maps), rpn.nms_thresh)
    scores, index = top(scores, rpn.post_nms_topk[False])
    return take(boxes, index), scores > NO_BOX


def _predict(heads: StandardROIHeads, features: Mapping[str, Tensor], proposals: Tensor) -> tuple[Tensor, Tensor]:
    """Return boxes, (N, R, C, 4) or (N, R, 1, 4), and probabilities, (N, R, C + 1)."""
    predictor, rois = heads.box_predictor, image_rois(proposals)
    pooled = pool(heads.box_pooler, [features[name] for name in heads.box_in_features], rois)
    logits, deltas = predictor(heads.box_head(pooled))
    sigmoid = getattr(predictor, "use_sigmoid_ce", False)  # an option of newer Detectron2
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    boxes = predictor.box2box_transform.apply_deltas(deltas, rois[:, 1:])
    rows = proposals.shape[:2]
    return boxes.unflatten(1, (-1, 4)).unflatten(0, rows), scores.unflatten(0, rows)


def _masks(heads: StandardROIHeads, features: Mapping[str, Tensor], boxes: Tensor, classes: Tensor) -> Tensor:
    """Return mask probabilities, (N, K, S, S), zeros in rows without a detection.

    The mask head runs on the detections alone, and on two empty boxes, so that torch.export need not ask whether there
    are any.
    """
    maps = [features[name] for name in heads.mask_in_features]
    kinds = F.pad(classes.flatten(), (1, 0), value=-1)
    rows = rows_with_dummies(classes >= 0)
    logits = heads.mask_head.layers(pool(heads.mask_pooler, maps, F.pad(image_rois(boxes), (0, 0, 1, 0))[rows]))
    if logits.shape[1] > 1:  # one mask per class
        kind = kinds[rows].clamp(min=0)[:, None, None, None]
        logits = logits.gather(1, kind.expand(-1, 1, *logits.shape[2:]))
    masks = logits.new_zeros(kinds.shape[0], *logits.shape[2:]).index_put((rows,), logits[:, 0].sigmoid())
    return masks[1:].unflatten(0, classes.shape)


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
