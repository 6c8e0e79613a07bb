"""RetinaNet as a function of tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .boxes import NO_BOX, clip, decode, grid_anchors, per_anchor, suppress, top
from .program import DetectorProgram


class RetinaNetProgram(DetectorProgram):
    """RetinaNet; see :class:`.DetectorProgram`."""

    ROWS = "max_detections_per_image"

    @property
    def head(self) -> Any:
        return self.model

    def detect(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        maps = [features[name] for name in model.head_in_features]
        all_boxes, all_scores, all_classes = [], [], []
        for logits, deltas, anchors in zip(*model.head(maps), grid_anchors(model.anchor_generator, maps), strict=True):
            scores = per_anchor(logits, model.num_classes).flatten(1).sigmoid()
            scores = torch.where(scores > self.score_threshold, scores, NO_BOX)
            scores, index = top(scores, model.test_topk_candidates)
            all_boxes.append(decode(model.box2box_transform, deltas, anchors, index // model.num_classes))
            all_scores.append(scores)
            all_classes.append(index % model.num_classes)
        boxes, scores, classes = (torch.cat(values, 1) for values in (all_boxes, all_scores, all_classes))
        finite = boxes.isfinite().all(2)
        boxes, scores = torch.where(finite[:, :, None], boxes, 0), torch.where(finite, scores, NO_BOX)
        scores = suppress(boxes, scores, classes, model.num_classes, model.test_nms_thresh)
        return self.select(clip(boxes, sizes), scores, classes)
