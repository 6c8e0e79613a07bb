"""Faster R-CNN, Mask R-CNN and RetinaNet as functions of tensors.

Their post-processing has fixed shapes.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from detectron2.layers import ROIAlign
from detectron2.modeling import FPN, GeneralizedRCNN, RetinaNet
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.dense_detector import permute_to_N_HWA_K
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN
from detectron2.modeling.roi_heads import (
    FastRCNNOutputLayers,
    MaskRCNNConvUpsampleHead,
    StandardROIHeads,
)
from torch import Tensor, nn

from ...errors import ExportError
from ...modeling import (
    GWMaskRCNNConvUpsampleHead,
    GWRetinaNet,
)
from .base import (
    NO_BOX,
    DetectorProgram,
    box_sides,
    clip,
    finite_only,
    rows_with_dummies,
    suppress,
    take,
    top,
    with_first_row,
)

# attribute -> the classes that are exported: how they compute boxes is written again here. All
# others are called as modules, and the comparison with the model finds what differs.
_RETINANET = {
    "anchor_generator": (DefaultAnchorGenerator,),
    "box2box_transform": (Box2BoxTransform,),
}
_RCNN = {
    "proposal_generator": (RPN,),
    "proposal_generator.anchor_generator": (DefaultAnchorGenerator,),
    "proposal_generator.box2box_transform": (Box2BoxTransform,),
    "roi_heads": (StandardROIHeads,),
    "roi_heads.box_pooler.level_poolers.0": (ROIAlign,),
    "roi_heads.box_predictor": (FastRCNNOutputLayers,),
    "roi_heads.box_predictor.box2box_transform": (Box2BoxTransform,),
}
_MASK_HEADS = (MaskRCNNConvUpsampleHead, GWMaskRCNNConvUpsampleHead)


def detector_program(
    model: nn.Module, classes: Mapping[int, str] | None = None
) -> DetectorProgram:
    """Return a detector as a function of tensors; see :class:`.DetectorProgram`.

    Raises:
        ExportError: the class of a part is none of those that are exported, or an argument is out
        of range.
    """
    _check_part("model", model, (GeneralizedRCNN, RetinaNet, GWRetinaNet))
    if not isinstance(model.backbone, FPN):
        _check_part("model.backbone", model.backbone, (FPN,))
    is_rcnn = isinstance(model, GeneralizedRCNN)
    for name, allowed in (_RCNN if is_rcnn else _RETINANET).items():
        part = operator.attrgetter(name)(model)
        _check_part(f"model.{name}", part, allowed)
    if not is_rcnn:
        return RetinaNetProgram(model, classes)

    heads: Any = model.roi_heads
    if heads.keypoint_on:
        _refuse("MODEL.KEYPOINT_ON (True): keypoints are not exported")
    if heads.mask_on:
        _check_part("model.roi_heads.mask_head", heads.mask_head, _MASK_HEADS)
    return RCNNProgram(model, classes)


def _check_part(where: str, part: Any, classes: tuple[type, ...]) -> None:
    if type(part) not in classes:
        names = " and ".join(cls.__name__ for cls in classes)
        own = type(part).__name__
        _refuse(f"{where} ('{own}'): cannot be exported; {names} can")


def _refuse(problem: str) -> None:
    raise ExportError(
        f"{problem}. Fix: export its backbone (gw-detectron export --backbone)."
    )


class RCNNProgram(DetectorProgram):
    """Faster or Mask R-CNN with an FPN."""

    max_detections_attr = "test_topk_per_image"

    def __init__(
        self, model: nn.Module, classes: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(model, classes)
        if self.model.roi_heads.mask_on:
            self.names.insert(3, "masks")

    @property
    def head(self) -> Any:
        return self.model.roi_heads.box_predictor

    def detect(
        self, features: Mapping[str, Tensor], sizes: Tensor
    ) -> tuple[Tensor, ...]:
        heads = self.model.roi_heads
        num_classes = self.head.num_classes
        proposals, is_real = _propose(self.model.proposal_generator, features, sizes)
        boxes, scores = _predict(heads, features, proposals)
        is_finite = boxes.isfinite().flatten(2).all(2)
        is_finite &= scores.isfinite().all(2)

        # one row for each proposal and class
        is_broken = ~is_finite[:, :, None, None]
        boxes = boxes.masked_fill(is_broken, 0)
        boxes = boxes.expand(-1, -1, num_classes, -1)  # class-agnostic ones
        boxes = clip(boxes.flatten(1, 2), sizes)
        scores = scores[:, :, :-1]  # without the background
        is_usable = is_finite & is_real
        is_wanted = is_usable[:, :, None] & (scores > self.score_threshold)
        scores = scores.masked_fill(~is_wanted, NO_BOX)
        scores = scores.flatten(1)

        classes = torch.arange(num_classes, device=scores.device)
        classes = classes.repeat(proposals.shape[1])
        threshold = self.head.test_nms_thresh
        scores = suppress(boxes, scores, classes, num_classes, threshold)
        classes = classes.expand_as(scores)
        boxes, scores, classes, count = self.select(boxes, scores, classes)
        if not heads.mask_on:
            return boxes, scores, classes, count
        masks = _masks(heads, features, boxes, classes)
        return boxes, scores, classes, masks, count


class RetinaNetProgram(DetectorProgram):
    """RetinaNet with an FPN."""

    max_detections_attr = "max_detections_per_image"

    @property
    def head(self) -> Any:
        return self.model

    def detect(
        self, features: Mapping[str, Tensor], sizes: Tensor
    ) -> tuple[Tensor, ...]:
        model = self.model
        num_classes = model.num_classes
        maps = [features[name] for name in model.head_in_features]
        all_boxes = []
        all_scores = []
        all_classes = []
        for logits, deltas, anchors in _dense_predictions(model.head, model, maps):
            # one row for each anchor and class
            scores = permute_to_N_HWA_K(logits, num_classes)
            scores = scores.flatten(1).sigmoid()
            is_wanted = scores > self.score_threshold
            scores = scores.masked_fill(~is_wanted, NO_BOX)
            scores, index = top(scores, model.test_topk_candidates)

            all_boxes.append(_decode(model, deltas, anchors, index // num_classes))
            all_scores.append(scores)
            all_classes.append(index % num_classes)

        boxes = torch.cat(all_boxes, 1)
        scores = torch.cat(all_scores, 1)
        classes = torch.cat(all_classes, 1)
        boxes, scores = finite_only(boxes, scores)
        scores = suppress(boxes, scores, classes, num_classes, model.test_nms_thresh)
        return self.select(clip(boxes, sizes), scores, classes)


def _dense_predictions(
    head: nn.Module, owner: Any, features: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits, deltas and anchors of each feature map."""
    logits, deltas = head(features)
    boxes = owner.anchor_generator(features)
    anchors = [level.tensor for level in boxes]
    return zip(logits, deltas, anchors, strict=True)


def _decode(owner: Any, prediction: Tensor, anchors: Tensor, index: Tensor) -> Tensor:
    """Decode the deltas of selected anchors of a level to boxes.

    Shape: deltas (N, A * 4, H, W), index (N, K) -> (N, K, 4).
    """
    all_deltas = permute_to_N_HWA_K(prediction, 4)
    deltas = take(all_deltas, index)
    own_anchors = anchors[index].flatten(0, 1)
    flat_deltas = deltas.flatten(0, 1)
    boxes = owner.box2box_transform.apply_deltas(flat_deltas, own_anchors)
    return boxes.view_as(deltas)


def _propose(
    rpn: RPN, features: Mapping[str, Tensor], sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Propose R boxes, (N, R, 4), as ``find_top_rpn_proposals`` does.

    The second result tells which rows hold one, (N, R).
    """
    maps = [features[name] for name in rpn.in_features]
    all_boxes = []
    all_scores = []
    all_levels = []
    predictions = _dense_predictions(rpn.rpn_head, rpn, maps)
    for level, (logits, deltas, anchors) in enumerate(predictions):
        scores = permute_to_N_HWA_K(logits, 1)
        scores, index = top(scores.flatten(1), rpn.pre_nms_topk[False])
        all_boxes.append(_decode(rpn, deltas, anchors, index))
        all_scores.append(scores)
        all_levels.append(torch.full_like(index[0], level))

    boxes = torch.cat(all_boxes, 1)
    scores = torch.cat(all_scores, 1)
    levels = torch.cat(all_levels)

    boxes, scores = finite_only(boxes, scores)
    boxes = clip(boxes, sizes)
    is_small = (box_sides(boxes) <= rpn.min_box_size).any(2)
    scores = scores.masked_fill(is_small, NO_BOX)
    scores = suppress(boxes, scores, levels, len(maps), rpn.nms_thresh)
    scores, index = top(scores, rpn.post_nms_topk[False])
    return take(boxes, index), scores > NO_BOX


def _predict(
    heads: StandardROIHeads, features: Mapping[str, Tensor], proposals: Tensor
) -> tuple[Tensor, Tensor]:
    """Return boxes, (N, R, C, 4) or (N, R, 1, 4), and probabilities, (N, R, C + 1)."""
    predictor = heads.box_predictor
    rois = image_rois(proposals)
    maps = [features[name] for name in heads.box_in_features]
    pooled = pool(heads.box_pooler, maps, rois)
    logits, deltas = predictor(heads.box_head(pooled))

    uses_sigmoid = getattr(predictor, "use_sigmoid_ce", False)  # newer than v0.6
    scores = logits.sigmoid() if uses_sigmoid else logits.softmax(1)
    boxes = predictor.box2box_transform.apply_deltas(deltas, rois[:, 1:])
    boxes = boxes.unflatten(1, (-1, 4))
    rows = proposals.shape[:2]
    return boxes.unflatten(0, rows), scores.unflatten(0, rows)


def _masks(
    heads: StandardROIHeads,
    features: Mapping[str, Tensor],
    boxes: Tensor,
    classes: Tensor,
) -> Tensor:
    """Return mask probabilities, (N, K, S, S), zeros in rows without a detection.

    The mask head runs on the detections and on two empty boxes, as torch.export assumes at least
    two rows.
    """
    # row 0 is an empty box of class 0
    all_rois = with_first_row(image_rois(boxes))
    all_classes = with_first_row(classes.flatten())
    rows = rows_with_dummies(classes >= 0)

    maps = [features[name] for name in heads.mask_in_features]
    pooled = pool(heads.mask_pooler, maps, all_rois[rows])
    logits = heads.mask_head.layers(pooled)
    size = logits.shape[2:]
    if logits.shape[1] > 1:  # one mask per class
        index = all_classes[rows, None, None, None]
        logits = logits.gather(1, index.expand(-1, 1, *size))

    masks = logits.new_zeros(all_classes.shape[0], *size)
    probabilities = logits[:, 0].sigmoid()
    masks = masks.index_put((rows,), probabilities)
    return masks[1:].unflatten(0, classes.shape)


def assign_levels(pooler: ROIPooler, boxes: Tensor) -> Tensor:
    r"""Assign boxes, (M, 4), to the levels of a pooler.

    .. math:: l = \lfloor l_0 + \log_2(\sqrt{wh} / s_0) \rfloor

    Comparing sides with :math:`s_0 2^{l - l_0}` gives the same without a logarithm, which runtimes
    round differently. Level 0 is the finest one.

    Source: Feature Pyramid Networks, equation (1).
    """
    side = box_sides(boxes).prod(1).sqrt()
    finest = pooler.min_level + 1 - pooler.canonical_level
    steps = [
        pooler.canonical_box_size * 2.0 ** (finest + step)
        for step in range(len(pooler.level_poolers) - 1)
    ]
    is_larger = side[:, None] >= side.new_tensor(steps)
    return is_larger.sum(1)


def pool(pooler: ROIPooler, features: Sequence[Tensor], rois: Tensor) -> Tensor:
    """Pool regions (image index, x0, y0, x1, y1) from the level of their size.

    Shape: rois (M, 5) -> (M, C, P, P).
    """
    level_of = assign_levels(pooler, rois[:, 1:])
    channels = features[0].shape[1]
    pooled = rois.new_zeros(rois.shape[0], channels, *pooler.output_size)
    levels = zip(features, pooler.level_poolers, strict=True)
    for level, (feature, align) in enumerate(levels):
        rows = (level_of == level).nonzero()[:, 0]
        values = align(feature, rois[rows])
        pooled = pooled.index_put((rows,), values)
    return pooled


def image_rois(boxes: Tensor) -> Tensor:
    """Put the index of the image before each box, (N, M, 4) -> (N * M, 5)."""
    count, rows, _ = boxes.shape
    images = torch.arange(count).to(boxes)
    images = images[:, None, None].expand(-1, rows, -1)
    return torch.cat((images, boxes), 2).flatten(0, 1)
