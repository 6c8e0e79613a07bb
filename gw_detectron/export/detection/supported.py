"""Check that a detector has only parts whose control flow can be exported."""

import operator
from typing import Any

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
from torch import nn

from ...errors import ExportError
from ...modeling import GWFastRCNNConvFCHead, GWMaskRCNNConvUpsampleHead, GWRetinaNet, GWRetinaNetHead

_FIX = "Fix: export its backbone with gw-detectron export-backbone."
# attribute -> the classes that are exported; a subclass may compute something else
_MODELS = (GeneralizedRCNN, RetinaNet, GWRetinaNet)
_BOXES = {"anchor_generator": (DefaultAnchorGenerator,), "box2box_transform": (Box2BoxTransform,)}
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


def check_supported(model: nn.Module) -> None:
    """Refuse detectors of which a part would be exported wrongly.

    Raises:
        ExportError: the class of a part is none of those that are exported, or the model has keypoints.
    """
    _check("model", model, _MODELS)
    if not isinstance(model.backbone, FPN):
        _refuse("model.backbone", model.backbone, (FPN,))
    if getattr(model.backbone, "padding_constraints", {}).get("square_size"):  # newer than Detectron2 v0.6
        raise ExportError(f"model.backbone: pads images to squares, which is not exported. {_FIX}")
    parts = _RCNN if isinstance(model, GeneralizedRCNN) else _RETINANET
    for name, classes in parts.items():
        _check(f"model.{name}", operator.attrgetter(name)(model), classes)
    if parts is _RETINANET:
        return
    heads: Any = model.roi_heads
    if heads.keypoint_on:
        raise ExportError(f"MODEL.KEYPOINT_ON (True): keypoints are not exported. {_FIX}")
    poolers = ["box_pooler"]
    if heads.mask_on:
        poolers.append("mask_pooler")
        for name, classes in _MASKS.items():
            _check(f"model.{name}", operator.attrgetter(name)(model), classes)
    for name in poolers:
        for layer in getattr(heads, name).level_poolers:
            _check(f"model.roi_heads.{name}", layer, (ROIAlign,))


def _check(where: str, part: Any, classes: tuple[type, ...]) -> None:
    if type(part) not in classes:
        _refuse(where, part, classes)


def _refuse(where: str, part: Any, classes: tuple[type, ...]) -> None:
    names = " and ".join(cls.__name__ for cls in classes)
    raise ExportError(f"{where} ('{type(part).__name__}'): is not exported as a whole; {names} are. {_FIX}")
