"""Detectors of which a part would be exported wrongly are refused by name."""

import pytest
from detectron2.modeling import build_model
from torch import nn

from gw_detectron.errors import ExportError
from gw_detectron.export import export_detector
from gw_detectron.export.detector import detector_program

from .tiny_networks import build_detector, detector_config

PARTS = {
    "mask": [
        "backbone",
        "proposal_generator",
        "proposal_generator.rpn_head",
        "proposal_generator.anchor_generator",
        "proposal_generator.box2box_transform",
        "roi_heads",
        "roi_heads.box_pooler",
        "roi_heads.box_head",
        "roi_heads.box_predictor",
        "roi_heads.mask_pooler",
        "roi_heads.mask_head",
    ],
    "retinanet": ["head", "anchor_generator", "box2box_transform"],
}


@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, parts in PARTS.items() for part in parts])
def test_other_classes_are_refused(tmp_path, kind, part):
    model = build_detector(kind)
    parent, _, name = f"model.{part}".rpartition(".")
    owner = model
    for each in parent.split(".")[1:]:
        owner = getattr(owner, each)
    own = type("Custom", (nn.Identity,), {})() if name != "box2box_transform" else type("Custom", (), {})()
    owner.__dict__.get("_modules", {}).pop(name, None)
    setattr(owner, name, own)
    message = rf"^model\.{part} \('Custom'\): is not exported as a whole; \w+.* (is|are)\. Fix: export its backbone"
    with pytest.raises(ExportError, match=message):
        export_detector(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_subclass_is_refused():
    model = build_detector("mask")
    model.roi_heads.__class__ = type("CustomROIHeads", (type(model.roi_heads),), {})
    with pytest.raises(ExportError, match=r"model.roi_heads \('CustomROIHeads'\)"):
        detector_program(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"MODEL__ROI_HEADS__NAME": "CascadeROIHeads", "MODEL__ROI_BOX_HEAD__CLS_AGNOSTIC_BBOX_REG": True},
            "CascadeROIHeads",
        ),
        ({"MODEL__KEYPOINT_ON": True}, r"MODEL.KEYPOINT_ON \(True\)"),
        ({"MODEL__ROI_BOX_HEAD__POOLER_TYPE": "ROIPool"}, r"model.roi_heads.box_pooler \('RoIPool'\)"),
        ({"MODEL__PROPOSAL_GENERATOR__NAME": "PrecomputedProposals"}, r"proposal_generator \('NoneType'\)"),
    ],
)
def test_other_detectors_are_refused(changes, message):
    with pytest.raises(ExportError, match=message):
        detector_program(build_model(detector_config("mask", **changes)))
