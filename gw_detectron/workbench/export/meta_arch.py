"""Faster R-CNN, Mask R-CNN and RetinaNet as functions of tensors, with post-processing of fixed shapes."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.layers import ROIAlign
from detectron2.modeling import FPN, GeneralizedRCNN, RetinaNet
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN
from detectron2.modeling.proposal_generator.rpn import StandardRPNHead
from detectron2.modeling.roi_heads import (
    FastRCNNConvFCHead,
    FastRCNNOutputLayers,
    MaskRCNNConvUpsampleHead,
    StandardROIHeads,
)
from torch import Tensor, nn

from ...errors import ExportError
from ...modeling import (
    GWFastRCNNConvFCHead,
    GWMaskRCNNConvUpsampleHead,
    GWRetinaNet,
    GWRetinaNetHead,
)
from .base import NO_BOX, DetectorProgram, clip, rows_with_dummies, suppress, take, top

# attribute -> the classes that are exported; a subclass may compute something else
_BOXES = {
    "anchor_generator": (DefaultAnchorGenerator,),
    "box2box_transform": (Box2BoxTransform,),
}
_RETINANET = {"head": (RetinaNetHead, GWRetinaNetHead), **_BOXES}
_RCNN = {
    "proposal_generator": (RPN,),
    "proposal_generator.rpn_head": (StandardRPNHead,),
    **{f"proposal_generator.{name}": classes for name, classes in _BOXES.items()},
    "roi_heads": (StandardROIHeads,),
    "roi_heads.box_pooler": (ROIPooler,),
    "roi_heads.box_head": (FastRCNNConvFCHead, GWFastRCNNConvFCHead),
    "roi_heads.box_predictor": (FastRCNNOutputLayers,),
    "roi_heads.box_predictor.box2box_transform": (Box2BoxTransform,),
}
_MASKS = {
    "roi_heads.mask_pooler": (ROIPooler,),
    "roi_heads.mask_head": (MaskRCNNConvUpsampleHead, GWMaskRCNNConvUpsampleHead),
}


def detector_program(
    model: nn.Module, classes: Mapping[int, str] | None = None
) -> DetectorProgram:
    """Return a detector as a function of tensors; see :class:`.DetectorProgram`.

    Raises:
        ExportError: the class of a part is none of those that are exported, or an argument is out of range.
    """
    _check_part("model", model, (GeneralizedRCNN, RetinaNet, GWRetinaNet))
    if not isinstance(model.backbone, FPN):
        _check_part("model.backbone", model.backbone, (FPN,))
    if not isinstance(model, GeneralizedRCNN):
        _check_parts(model, _RETINANET)
        return RetinaNetProgram(model, classes)
    _check_parts(model, _RCNN)
    heads: Any = model.roi_heads
    if heads.keypoint_on:
        _refuse("MODEL.KEYPOINT_ON (True): keypoints are not exported")
    if heads.mask_on:
        _check_parts(model, _MASKS)
    for name in ("box_pooler", "mask_pooler") if heads.mask_on else ("box_pooler",):
        for layer in getattr(heads, name).level_poolers:
            _check_part(f"model.roi_heads.{name}", layer, (ROIAlign,))
    return RCNNProgram(model, classes)


def _check_parts(model: nn.Module, parts: Mapping[str, tuple[type, ...]]) -> None:
    for name, classes in parts.items():
        _check_part(f"model.{name}", operator.attrgetter(name)(model), classes)


def _check_part(where: str, part: Any, classes: tuple[type, ...]) -> None:
    if type(part) not in classes:
        names = " and ".join(cls.__name__ for cls in classes)
        _refuse(f"{where} ('{type(part).__name__}'): cannot be exported; {names} can")


def _refuse(problem: str) -> None:
    raise ExportError(f"{problem}. Fix: export its backbone (gw-detectron export --backbone).")


class RCNNProgram(DetectorProgram):
    """Faster or Mask R-CNN with an FPN."""

    max_detections_attr = "test_topk_per_image"

    @property
    def head(self) -> Any:
        return self.model.roi_heads.box_predictor

    def detect(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        heads = self.model.roi_heads
        proposals, real = _propose(self.model.proposal_generator, features, sizes)
        boxes, scores = _predict(heads, features, proposals)
        finite = boxes.isfinite().flatten(2).all(2) & scores.isfinite().all(2)
        boxes = clip(
            torch.where(finite[:, :, None, None], boxes, 0).flatten(1, 2), sizes
        ).view_as(boxes)
        scores = scores[:, :, :-1]  # without the background
        predictor = heads.box_predictor
        wanted = (finite & real)[:, :, None] & (scores > self.score_threshold)
        scores = torch.where(wanted, scores, NO_BOX).flatten(1)
        boxes = boxes.expand(-1, -1, predictor.num_classes, -1).flatten(
            1, 2
        )  # for class-agnostic boxes
        classes = torch.arange(predictor.num_classes, device=scores.device).repeat(
            proposals.shape[1]
        )
        scores = suppress(
            boxes, scores, classes, predictor.num_classes, predictor.test_nms_thresh
        )
        boxes, scores, classes, count = self.select(boxes, scores, classes.expand_as(scores))
        if not heads.mask_on:
            return boxes, scores, classes, count
        return boxes, scores, classes, _masks(heads, features, boxes, classes), count


class RetinaNetProgram(DetectorProgram):
    """RetinaNet with an FPN."""

    max_detections_attr = "max_detections_per_image"

    @property
    def head(self) -> Any:
        return self.model

    def detect(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        maps = [features[name] for name in model.head_in_features]
        all_boxes, all_scores, all_classes = [], [], []
        for logits, deltas, anchors in zip(
            *model.head(maps), _grid_anchors(model.anchor_generator, maps), strict=True
        ):
            scores = _per_anchor(logits, model.num_classes).flatten(1).sigmoid()
            scores = torch.where(scores > self.score_threshold, scores, NO_BOX)
            scores, index = top(scores, model.test_topk_candidates)
            all_boxes.append(
                _decode(model.box2box_transform, deltas, anchors, index // model.num_classes)
            )
            all_scores.append(scores)
            all_classes.append(index % model.num_classes)
        boxes, scores, classes = (
            torch.cat(values, 1) for values in (all_boxes, all_scores, all_classes)
        )
        finite = boxes.isfinite().all(2)
        boxes, scores = (
            torch.where(finite[:, :, None], boxes, 0),
            torch.where(finite, scores, NO_BOX),
        )
        scores = suppress(boxes, scores, classes, model.num_classes, model.test_nms_thresh)
        return self.select(clip(boxes, sizes), scores, classes)


def _grid_anchors(
    generator: DefaultAnchorGenerator, features: Sequence[Tensor]
) -> list[Tensor]:
    """Place the anchors of a generator on feature maps, (N, C, H, W); return one (H * W * A, 4) per level."""
    anchors = []
    for feature, stride, cell in zip(
        features, generator.strides, generator.cell_anchors, strict=True
    ):
        y, x = (
            (torch.arange(side, device=cell.device) + generator.offset) * stride
            for side in feature.shape[-2:]
        )
        y, x = y[:, None].expand(-1, feature.shape[-1]), x.expand(feature.shape[-2], -1)
        anchors.append((torch.stack((x, y, x, y), 2)[:, :, None] + cell).reshape(-1, 4))
    return anchors


def _per_anchor(prediction: Tensor, values: int) -> Tensor:
    """Reorder a dense prediction, (N, A * values, H, W) -> (N, H * W * A, values)."""
    return prediction.unflatten(1, (-1, values)).permute(0, 3, 4, 1, 2).flatten(1, 3)


def _decode(
    transform: Box2BoxTransform, prediction: Tensor, anchors: Tensor, index: Tensor
) -> Tensor:
    """Decode the deltas, (N, A * 4, H, W), of the selected anchors, (N, K), of a level to boxes, (N, K, 4)."""
    deltas = take(_per_anchor(prediction, 4), index)
    return transform.apply_deltas(deltas.flatten(0, 1), anchors[index].flatten(0, 1)).view_as(
        deltas
    )


def _propose(rpn: RPN, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Propose R boxes, (N, R, 4), as ``find_top_rpn_proposals`` does; also return which rows hold one, (N, R)."""
    maps = [features[name] for name in rpn.in_features]
    predictions = zip(
        *rpn.rpn_head(maps), _grid_anchors(rpn.anchor_generator, maps), strict=True
    )
    all_boxes, all_scores, all_levels = [], [], []
    for level, (logits, deltas, anchors) in enumerate(predictions):
        scores, index = top(_per_anchor(logits, 1)[:, :, 0], rpn.pre_nms_topk[False])
        all_boxes.append(_decode(rpn.box2box_transform, deltas, anchors, index))
        all_scores.append(scores)
        all_levels.append(torch.full_like(index[0], level))
    boxes, scores, levels = (
        torch.cat(all_boxes, 1),
        torch.cat(all_scores, 1),
        torch.cat(all_levels),
    )

    finite = boxes.isfinite().all(2) & scores.isfinite()
    boxes = clip(torch.where(finite[:, :, None], boxes, 0), sizes)
    large = (boxes[:, :, 2:] - boxes[:, :, :2] > rpn.min_box_size).all(2)
    scores = torch.where(finite & large, scores, NO_BOX)
    scores = suppress(boxes, scores, levels, len(maps), rpn.nms_thresh)
    scores, index = top(scores, rpn.post_nms_topk[False])
    return take(boxes, index), scores > NO_BOX


def _predict(
    heads: StandardROIHeads, features: Mapping[str, Tensor], proposals: Tensor
) -> tuple[Tensor, Tensor]:
    """Return boxes, (N, R, C, 4) or (N, R, 1, 4), and probabilities, (N, R, C + 1)."""
    predictor, rois = heads.box_predictor, image_rois(proposals)
    pooled = pool(heads.box_pooler, [features[name] for name in heads.box_in_features], rois)
    logits, deltas = predictor(heads.box_head(pooled))
    sigmoid = getattr(predictor, "use_sigmoid_ce", False)  # newer than v0.6
    scores = logits.sigmoid() if sigmoid else logits.softmax(1)
    boxes = predictor.box2box_transform.apply_deltas(deltas, rois[:, 1:])
    rows = proposals.shape[:2]
    return boxes.unflatten(1, (-1, 4)).unflatten(0, rows), scores.unflatten(0, rows)


def _masks(
    heads: StandardROIHeads, features: Mapping[str, Tensor], boxes: Tensor, classes: Tensor
) -> Tensor:
    """Return mask probabilities, (N, K, S, S), zeros in rows without a detection.

    The mask head runs on the detections and on two empty boxes, as torch.export assumes at least two rows.
    """
    maps = [features[name] for name in heads.mask_in_features]
    kinds = F.pad(classes.flatten(), (1, 0), value=-1)
    rows = rows_with_dummies(classes >= 0)
    logits = heads.mask_head.layers(
        pool(heads.mask_pooler, maps, F.pad(image_rois(boxes), (0, 0, 1, 0))[rows])
    )
    if logits.shape[1] > 1:  # one mask per class
        kind = kinds[rows].clamp(min=0)[:, None, None, None]
        logits = logits.gather(1, kind.expand(-1, 1, *logits.shape[2:]))
    masks = logits.new_zeros(kinds.shape[0], *logits.shape[2:]).index_put(
        (rows,), logits[:, 0].sigmoid()
    )
    return masks[1:].unflatten(0, classes.shape)


def assign_levels(pooler: ROIPooler, boxes: Tensor) -> Tensor:
    r"""Assign boxes, (M, 4), to the levels of a pooler.

    .. math:: l = \lfloor l_0 + \log_2(\sqrt{wh} / s_0) \rfloor

    Comparing sides with :math:`s_0 2^{l - l_0}` gives the same without a logarithm, which runtimes round differently.
    Level 0 is the finest one.

    Source: Feature Pyramid Networks, equation (1).
    """
    side = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    levels = range(pooler.min_level + 1, pooler.max_level + 1)
    steps = [
        pooler.canonical_box_size * 2.0 ** (level - pooler.canonical_level) for level in levels
    ]
    return (side[:, None] >= side.new_tensor(steps)).sum(1)


def pool(pooler: ROIPooler, features: Sequence[Tensor], rois: Tensor) -> Tensor:
    """Pool regions (image index, x0, y0, x1, y1), (M, 5), from the level of their size to (M, C, P, P)."""
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
