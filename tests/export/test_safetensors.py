"""Weights come back with the norms and the preprocessing that they record."""

import pytest
import torch
from detectron2.modeling import build_backbone
from safetensors.torch import load_file

from gw_detectron.export import FeatureExtractor, Normalization, export_backbone
from gw_detectron.export.backbone import write_safetensors
from gw_detectron.model_zoo import get_config
from gw_detectron.modeling import gw_resnet
from gw_detectron.norms import evaluation_spec, norm_rows
from gw_detectron.weights import Preprocessing, load_weights
from gw_detectron.weights.network import TORCHVISION, full_name
from gw_detectron.weights.verify import config_for


def backbone_of(*opts, fpn=False):
    cfg = get_config("quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml")
    cfg.merge_from_list([word for pair in opts for word in pair])
    torch.manual_seed(0)
    backbone = build_backbone(cfg)
    with torch.no_grad():
        for name, value in backbone.state_dict().items():
            if name.endswith(("running_mean", "norm.bias")):
                value.normal_(0, 0.1)
            elif name.endswith(("running_var", "norm.weight")):
                value.uniform_(0.5, 1.5)
    return backbone if fpn else getattr(backbone, "bottom_up", backbone)


def test_weights(tmp_path, normalization):
    backbone = backbone_of(fpn=True)
    report = export_backbone(backbone, tmp_path / "fpn", normalization, file_format="safetensors")
    weights = load_file(tmp_path / "fpn" / "backbone.safetensors")
    assert weights.keys() == backbone.state_dict().keys()
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in weights.items())
    assert report["worst_relative"] == 0
    with pytest.raises(ValueError, match="--no-fpn"):
        load_weights(tmp_path / "fpn" / "backbone.safetensors")
    export_backbone(backbone, tmp_path / "resnet", normalization, file_format="safetensors", fpn=False)
    conversion = load_weights(tmp_path / "resnet" / "backbone.safetensors")  # as MODEL.WEIGHTS gw://file/ does
    assert (conversion.architecture.name, conversion.positions.positions) == ("R-18", "S1-B2")


@pytest.mark.parametrize(
    ("norm", "whitening", "where"),
    [
        ("BN", "GW", "S1-B2"),
        ("FrozenBN", "GW:iters=3,eps=1e-3", "ALL"),
        ("FrozenBN", "GW:groups=128,solver=zca", "S1-B1"),
        ("GN:groups=64", "GW", "S1-B2"),
        ("FrozenBN", "BW:channels=32,solver=zca", "S1-B2"),
        ("SyncBN", "BW:running=covariance,corr=true", "ALL"),
        ("BN", "BN:rotation=cayley", "S1"),
    ],
)
def test_norms_come_back(tmp_path, normalization, norm, whitening, where):
    opts = {"NORM": norm, "WHITEN_NORM": whitening, "WHITEN_POSITIONS": where}.items()
    backbone = backbone_of(*((f"MODEL.RESNETS.{key}", value) for key, value in opts), ("MODEL.BACKBONE.FREEZE_AT", 2))
    path = tmp_path / "a.safetensors"
    write_safetensors(FeatureExtractor(backbone, normalization), path)
    conversion = load_weights(path)
    assert conversion.preprocessing == TORCHVISION
    cfg = config_for(conversion)
    cfg.MODEL.BACKBONE.update({"NAME": "build_gw_resnet_backbone", "FREEZE_AT": 0})
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res5"]
    expected, found = (
        {row.layer: evaluation_spec(full_name(row.spec, row.channels)) for row in norm_rows(model)}
        for model in (backbone, build_backbone(cfg))
    )
    assert found == expected
    with pytest.raises(ValueError, match="the weights have"):
        load_weights(path, norm="GN:groups=2")


def test_preprocessing_comes_back(tmp_path):
    images = Normalization("BGR", (1.0, 2.0, 3.0), (1.0, 1.0, 1.0))
    opts = {"DEPTH": 50, "RES2_OUT_CHANNELS": 256, "STRIDE_IN_1X1": True}.items()
    backbone = backbone_of(*((f"MODEL.RESNETS.{key}", value) for key, value in opts))
    write_safetensors(FeatureExtractor(backbone, images), tmp_path / "a.safetensors")
    expected = Preprocessing("BGR", images.pixel_mean, images.pixel_std, True)
    assert load_weights(tmp_path / "a.safetensors").preprocessing == expected


def test_dilated_network_does_not_come_back(tmp_path, normalization):
    backbone = gw_resnet(50, norm="BN", res5_dilation=2)
    write_safetensors(FeatureExtractor(backbone, normalization), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"res5: the network is dilated .*RES5_DILATION 2"):
        load_weights(tmp_path / "a.safetensors")
