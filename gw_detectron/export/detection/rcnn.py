"""Faster and Mask R-CNN as a function of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.modeling.roi_heads import StandardROIHeads
from torch import Tensor

from .boxes import NO_BOX, clip, rows_with_dummies, suppress
from .pooling import image_rois, pool
from .program import DetectorProgram
from .proposals import propose


class RCNNProgram(DetectorProgram):
    """Faster or Mask R-CNN with an FPN; see :class:`.DetectorProgram`."""

    def __init__(self, model: Any, detections: int | None = None, class_names: Sequence[str] | None = None) -> None:
        predictor = model.roi_heads.box_predictor
        super().__init__(
            model,
            detections,
            class_names,
            predictor.num_classes,
            predictor.test_topk_per_image,
            predictor.test_score_thresh,
        )
        self.model.roi_heads.box_predictor.test_topk_per_image = self.detections  # of the model to compare with

    def detect(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        heads = self.model.roi_heads
        proposals, real = propose(self.model.proposal_generator, features, sizes)
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
