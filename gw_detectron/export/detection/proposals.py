"""The region proposal network of a detector as a function of tensors."""

from collections.abc import Mapping

import torch
from detectron2.modeling.proposal_generator import RPN
from torch import Tensor

from .boxes import NO_BOX, clip, decode, grid_anchors, per_anchor, suppress, take, top


def propose(rpn: RPN, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
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
