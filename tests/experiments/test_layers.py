"""Whitening layers of a model on images: rows, findings, and weights that are refused."""

import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image

from experiments.layers import analyze_layers
from gw_detectron.config import read_config
from gw_detectron.errors import WeightsError

from ..tiny_run import CONFIG, OPTS

WORDS = [str(word) for pair in OPTS.items() for word in pair]


def analyze(**options):
    return analyze_layers(config_file=str(CONFIG), opts=WORDS, count=1, **options)


def test_every_layer_has_its_row(tmp_path):
    Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "noise.png")
    result = analyze(images=tmp_path)
    assert result.settings["images"] == ["noise.png"]
    assert result.rows[0]["layer"] == "backbone.bottom_up.stem.conv1.norm" and result.rows[0]["finite"]
    assert {"roi_heads.box_head.conv1.norm", "backbone.fpn_output2.norm"} <= {row["layer"] for row in result.rows}
    for row in result.rows:
        if row["trace"] is not None:
            assert 0 < row["lambda_min"] < row["lambda_max"] <= row["condition_before"] * row["lambda_max"]
            assert row["residual"] <= row["residual_max"]
    assert result.findings["input, covariance and output of all layers are finite"]


def test_weights_without_some_whitening_layers_are_refused(tmp_path):
    weights = build_model(read_config(str(CONFIG), WORDS)).state_dict()
    backbone = {name: value for name, value in weights.items() if name.startswith("backbone.bottom_up.")}
    torch.save({"model": backbone}, tmp_path / "some.pth")
    with pytest.raises(WeightsError, match=r"backbone.fpn_lateral2.norm"):
        analyze(weights=str(tmp_path / "some.pth"))
    assert analyze(weights=str(tmp_path / "some.pth"), allow_partial=True).rows
