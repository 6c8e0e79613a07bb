"""Whitening layers of a model on images: rows, findings, weights and images that are refused."""

import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image

from gw_detectron.analysis import analyze_layers
from gw_detectron.config import read_config
from gw_detectron.errors import PartialLoadError
from gw_detectron.layers import GroupWhitening2d

from ..tiny_run import CONFIG, OPTS


@pytest.fixture
def cfg():
    words = [str(word) for pair in OPTS.items() for word in pair]
    return read_config(str(CONFIG), words)


def test_every_layer_has_its_row(cfg, tmp_path):
    Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "noise.png")
    result = analyze_layers(cfg, tmp_path, count=3)
    assert result.settings["images"] == ["noise.png"]
    assert result.rows[0]["layer"] == "backbone.bottom_up.stem.conv1.norm" and result.rows[0]["finite"]
    assert result.rows[0]["norm"].startswith("GW:groups=64")
    assert {"roi_heads.box_head.conv1.norm", "backbone.fpn_output2.norm"} <= {row["layer"] for row in result.rows}
    for row in result.rows:
        if row["trace"] is not None:
            assert 0 < row["lambda_min"] < row["lambda_max"] <= row["condition_before"] * row["lambda_max"]
            assert row["residual"] <= row["residual_max"]
    assert result.findings["input, covariance and output of all layers are finite"]


def test_the_first_layer_that_is_not_finite_is_named(cfg, monkeypatch):
    forward = GroupWhitening2d.forward

    def broken(self, x, **options):
        return forward(self, x, **options) * (float("nan") if self.num_channels == 128 else 1)

    monkeypatch.setattr(GroupWhitening2d, "forward", broken)
    result = analyze_layers(cfg, count=1)
    (sentence,) = (text for text, holds in result.findings.items() if not holds)
    assert sentence.endswith("the first that is not: backbone.bottom_up.res3.0.conv2.norm")
    assert [row["finite"] for row in result.rows[:4]] == [True, True, True, False]


@pytest.mark.parametrize("solver", ["standardize", "zca"])  # zca raises the error itself
def test_the_layer_whose_covariance_overflows_is_named(cfg, tmp_path, solver):
    cfg.MODEL.RESNETS.WHITEN_NORM = f"GW:solver={solver}"
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1"
    weights = build_model(cfg).state_dict()
    weights["backbone.bottom_up.stem.conv1.weight"].fill_(1e20)
    torch.save({"model": weights}, tmp_path / "large.pth")
    cfg.MODEL.WEIGHTS = str(tmp_path / "large.pth")
    result = analyze_layers(cfg, count=1)
    (sentence,) = (text for text, holds in result.findings.items() if "finite" in text and not holds)
    assert sentence.endswith("the first that is not: backbone.bottom_up.stem.conv1.norm")


def test_weights_of_another_model_are_refused(cfg, tmp_path):
    weights = build_model(cfg).state_dict()
    cfg.MODEL.WEIGHTS = str(tmp_path / "some.pth")
    torch.save({"model": {"nothing.that.fits": torch.zeros(1)}}, cfg.MODEL.WEIGHTS)
    with pytest.raises(PartialLoadError, match="backbone: 0/"):
        analyze_layers(cfg, count=1)
    backbone = {name: value for name, value in weights.items() if name.startswith("backbone.bottom_up.")}
    torch.save({"model": backbone}, cfg.MODEL.WEIGHTS)
    with pytest.raises(PartialLoadError, match=r"whitening layers are missing: backbone.fpn_lateral2.norm"):
        analyze_layers(cfg, count=1)
    partial = analyze_layers(cfg, count=1, allow_partial=True)
    assert partial.settings["loaded"].endswith("FPN and heads start new, as expected")
    torch.save({"model": weights}, cfg.MODEL.WEIGHTS)
    assert "new are" not in analyze_layers(cfg, count=1).settings["loaded"]


def test_nothing_is_found_in_layers_that_are_not_reached(cfg, monkeypatch):
    monkeypatch.setattr("detectron2.modeling.GeneralizedRCNN.forward", lambda self, batch: [])
    result = analyze_layers(cfg, count=1)
    assert result.findings == {} and {row["finite"] for row in result.rows} == {None}


def test_images_are_read_one_at_a_time(cfg, tmp_path, monkeypatch):
    Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.png").write_text("no image")
    calls = []
    monkeypatch.setattr("detectron2.modeling.GeneralizedRCNN.forward", lambda self, batch: calls.append(batch))
    with pytest.raises(ValueError, match=r"b\.png"):
        analyze_layers(cfg, tmp_path, count=3)
    assert len(calls) == 1
    (tmp_path / "b.png").unlink()
    with pytest.raises(ValueError, match=r"c\.png"):
        analyze_layers(cfg, tmp_path, count=3)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"samples": -1}, {"count": 0}])
def test_invalid_counts(cfg, wrong):
    with pytest.raises(ValueError, match=r"{} \({}\): too small".format(*next(iter(wrong.items())))):
        analyze_layers(cfg, **wrong)


def test_a_model_without_whitening(cfg):
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    cfg.MODEL.FPN.NORM = cfg.MODEL.ROI_BOX_HEAD.NORM = cfg.MODEL.ROI_MASK_HEAD.NORM = "GN"
    with pytest.raises(ValueError, match="no whitening layers"):
        analyze_layers(cfg)


def test_a_folder_without_images(cfg, tmp_path):
    with pytest.raises(ValueError, match="none found"):
        analyze_layers(cfg, tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        analyze_layers(cfg, tmp_path / "nowhere")
