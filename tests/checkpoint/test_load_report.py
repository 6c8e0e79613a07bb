"""The strict load: a backbone tensor that is not loaded is an error, whatever the checkpointer says."""

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model

from gw_detectron.checkpoint import PartialLoadError, convert, convert_file, strict_backbone_load

from .synthetic import authors_state, make_network


@pytest.fixture
def model(detector_cfg):
    return build_model(detector_cfg)


def _load(model, content, tmp_path, *, allow_partial=False):
    torch.save(content, tmp_path / "weights.pth")
    with strict_backbone_load(model, "", allow_partial=allow_partial) as report:
        DetectionCheckpointer(model).load(str(tmp_path / "weights.pth"))
    return str(report)


def _converted(state):
    return {"model": convert(state).tensors, "matching_heuristics": True}


def test_whole_backbone(model, r18, tmp_path):
    report = _load(model, _converted(r18), tmp_path)
    assert report == "backbone: 82/82 tensors; FPN and heads start new, as expected"


def test_whole_detector_and_one_with_other_classes(model, tmp_path):
    state = model.state_dict()
    others = sum(not name.startswith("backbone.bottom_up.") for name in state)
    expected = f"backbone: 82/82 tensors; FPN and heads: {others}/{others}"
    assert _load(model, {"model": dict(state)}, tmp_path) == expected
    state["roi_heads.box_predictor.cls_score.weight"] = torch.ones(3, 16)
    report = _load(model, {"model": state}, tmp_path)
    assert report.endswith(f"{others - 1}/{others}, new are roi_heads.box_predictor.cls_score.weight")


def test_the_classifier_of_the_source_is_no_backbone_tensor(model, r18, tmp_path):
    content = {"model": convert(r18, keep_fc=True).tensors, "matching_heuristics": True}
    assert _load(model, content, tmp_path).startswith("backbone: 82/82 tensors; FPN")


def test_a_missing_tensor_is_an_error_unless_allowed(model, r18, tmp_path):
    content = _converted(r18)
    del content["model"]["res3.0.conv1.norm.weight"]
    with pytest.raises(PartialLoadError, match="81/82") as caught:
        _load(model, content, tmp_path)
    assert "not loaded: backbone.bottom_up.res3.0.conv1.norm.weight" in str(caught.value)
    assert "--allow-partial" in str(caught.value)
    assert "81/82" in _load(model, content, tmp_path, allow_partial=True)


def test_statistics_that_frozen_batch_norm_would_make_up_are_missed(model, r18, tmp_path):
    content = _converted(r18)
    del content["model"]["res2.0.conv2.norm.running_var"]
    with pytest.raises(PartialLoadError, match=r"not loaded: backbone\.bottom_up\.res2\.0\.conv2\.norm\.running_var"):
        _load(model, content, tmp_path)


def test_a_wrong_shape_that_detectron2_only_warns_about(model, r18, tmp_path):
    content = _converted(r18)
    weight = content["model"]["stem.conv1.norm.weight"]
    content["model"]["stem.conv1.norm.weight"] = weight.view(1, -1, 1, 1)
    with pytest.raises(PartialLoadError, match="not loaded: backbone.bottom_up.stem.conv1.norm.weight"):
        _load(model, content, tmp_path)


def test_weights_with_batch_norm_where_the_model_whitens(model, tmp_path):
    content = _converted(make_network("R-18").state_dict())
    with pytest.raises(PartialLoadError, match=r"have no place \(res2\.0\.conv1\.norm\.running_mean"):
        _load(model, content, tmp_path)


def test_weights_with_whitening_where_the_model_has_batch_norm(detector_cfg, r18, tmp_path):
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    with pytest.raises(PartialLoadError, match="82/100"):
        _load(build_model(detector_cfg), _converted(r18), tmp_path)


def test_an_unconverted_file_is_told_how_to_be_converted(model, r18, tmp_path):
    with pytest.raises(PartialLoadError, match=r"0/82.*(?s:.)*convert_weights\.py"):
        _load(model, {"model": r18}, tmp_path)


def test_statistics_inside_scale_and_shift_as_caffe2_has_them(detector_cfg, tmp_path):
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    tensors = convert(make_network("R-18").state_dict()).tensors
    fused = {name: value for name, value in tensors.items() if ".running_" not in name}
    report = _load(build_model(detector_cfg), {"model": fused, "matching_heuristics": True}, tmp_path)
    assert report.startswith("backbone: 100/100 tensors; 20 FrozenBN without statistics, right for Caffe2")


def test_no_weights_and_live_batch_norm(detector_cfg, r18_file, tmp_path):
    detector_cfg.MODEL.RESNETS.NORM = "BN"
    model = build_model(detector_cfg)
    with strict_backbone_load(model, "") as report:
        DetectionCheckpointer(model).load("")
    assert str(report) == "no weights were loaded: backbone, FPN and heads start new"
    convert_file(r18_file, tmp_path / "a.pkl")
    with strict_backbone_load(model, "") as report:
        DetectionCheckpointer(model).load(str(tmp_path / "a.pkl"))
    assert str(report).startswith("backbone: 82/82 tensors")


def test_backbone_without_fpn(detector_cfg, r18, tmp_path):
    detector_cfg.MODEL.BACKBONE.NAME = "build_gw_resnet_backbone"
    detector_cfg.MODEL.RPN.IN_FEATURES = ["res4"]
    detector_cfg.MODEL.ROI_HEADS.IN_FEATURES = ["res4"]
    detector_cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32]]
    model = build_model(detector_cfg)
    assert _load(model, _converted(r18), tmp_path).startswith("backbone: 82/82 tensors")


def test_the_error_of_the_loading_itself_is_not_replaced(model):
    with pytest.raises(AssertionError, match="not found"), strict_backbone_load(model, ""):
        DetectionCheckpointer(model).load("nowhere.pth")


def test_position_names_are_those_of_the_builder(r18):
    state = authors_state(make_network("R-50", "S1-B3"))
    assert convert(state, positions="S1-B3").positions == "S1-B3"
