"""Detectors with MixGW start from BN's weights in all forms that Detectron2 knows, and from no others."""

import pickle

import pytest
import torch
from detectron2.modeling import build_model
from torch import nn

from gw_detectron.errors import WeightsError
from gw_detectron.layers import MixedWhitening2d
from gw_detectron.weights import (
    GWDetectionCheckpointer,
    NormRecorder,
    load_checkpoint,
    open_checkpoint,
)


@pytest.fixture
def frozen_bn(detector_cfg):
    detector_cfg.MODEL.RESNETS.NORM = "FrozenBN"
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    torch.manual_seed(0)
    model = build_model(detector_cfg).eval()
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            nn.init.uniform_(tensor, 0.5, 2)
        elif name.endswith("running_mean"):
            nn.init.normal_(tensor)
    return model


@pytest.fixture
def mixed(detector_cfg):
    def build(shares="alpha=0", positions="S1-B2"):
        detector_cfg.MODEL.RESNETS.NORM = "FrozenBN"
        detector_cfg.MODEL.RESNETS.WHITEN_NORM = f"MixGW:{shares}"
        detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = positions
        return build_model(detector_cfg).eval()

    return build


def load(model, path):
    return str(load_checkpoint(model, open_checkpoint(str(path))))


def features(model):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((2, 3, 64, 96), generator=generator) * 255
    with torch.no_grad():
        return model.backbone(images)


def save_recorded(model, path):
    content = {"model": model.state_dict(), "norms": NormRecorder(model).state_dict()}
    torch.save(content, path)


def save_plain(model, path):
    torch.save({"model": model.state_dict()}, path)


def save_as_the_zoo(model, path):
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    content = {"model": arrays, "__author__": "Detectron2 Model Zoo"}
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("recorded.pth", save_recorded),
        ("plain.pth", save_plain),
        ("zoo.pkl", save_as_the_zoo),
    ],
)
@pytest.mark.parametrize("positions", ["S1-B2", "ALL"])
def test_a_bn_detector_loads_strictly_with_equal_outputs(
    frozen_bn, mixed, tmp_path, name, save, positions
):
    save(frozen_bn, tmp_path / name)
    model = mixed(positions=positions)

    report = load(model, tmp_path / name)

    assert "backbone: 100/100 tensors" in report
    expected = features(frozen_bn)
    for level, values in features(model).items():
        assert torch.equal(values, expected[level])


def test_a_mixed_detector_does_not_load_as_bn_or_another_mixture(
    detector_cfg, frozen_bn, mixed, tmp_path
):
    save_recorded(mixed("alpha=0.5"), tmp_path / "mixed.pth")

    with pytest.raises(WeightsError, match="trained with other norms"):
        load(frozen_bn, tmp_path / "mixed.pth")
    with pytest.raises(WeightsError, match="trained with other norms"):
        load(mixed("alpha=0.3"), tmp_path / "mixed.pth")


def test_weights_of_gw_are_refused(detector_cfg, mixed, tmp_path):
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1-B2"
    detector_cfg.MODEL.RESNETS.WHITEN_NORM = "GW"
    save_plain(build_model(detector_cfg), tmp_path / "gw.pth")

    with pytest.raises(WeightsError, match="running_mean"):
        load(mixed(), tmp_path / "gw.pth")


def test_statistics_that_were_multiplied_into_the_scale_are_a_warning(
    frozen_bn, mixed, tmp_path, caplog
):
    for name, tensor in frozen_bn.state_dict().items():
        if name.endswith("running_var"):
            nn.init.constant_(tensor, 1 - 1e-5)
        elif name.endswith("running_mean"):
            nn.init.zeros_(tensor)
    save_as_the_zoo(frozen_bn, tmp_path / "zoo.pkl")
    model = mixed("alpha=0.5")
    layers = sum(isinstance(layer, MixedWhitening2d) for layer in model.modules())

    GWDetectionCheckpointer(model).load(str(tmp_path / "zoo.pkl"))

    assert f"mean 0 and variance 1 in {layers} layers" in caplog.text


def test_bn_without_a_record_of_norms_is_no_reason_for_a_warning(
    frozen_bn, mixed, tmp_path, caplog
):
    torch.save({"model": frozen_bn.state_dict()}, tmp_path / "bn.pth")

    load(mixed(), tmp_path / "bn.pth")

    assert "records no norms" not in caplog.text
