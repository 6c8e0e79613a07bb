"""Weights in Detectron2's and torchvision's names come back with the norms and the preprocessing that they record."""

import json

import pytest
import torch
import torchvision
from detectron2.layers import get_norm
from detectron2.modeling import build_backbone
from safetensors import safe_open
from safetensors.torch import load_file

from gw_detectron import resolve_norm
from gw_detectron.errors import ExportError
from gw_detectron.export import FeatureExtractor, Normalization, export_backbone
from gw_detectron.export.formats import write_safetensors
from gw_detectron.model_zoo import get_config
from gw_detectron.norms import evaluation_spec, norm_rows
from gw_detectron.weights import Preprocessing, load_weights
from gw_detectron.weights.architecture import full_name
from gw_detectron.weights.verify import config_for

PIXELS = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
R50 = (("MODEL.RESNETS.DEPTH", 50), ("MODEL.RESNETS.RES2_OUT_CHANNELS", 256))
X50 = (*R50, ("MODEL.RESNETS.NUM_GROUPS", 32), ("MODEL.RESNETS.WIDTH_PER_GROUP", 4))
FROZEN = ("MODEL.RESNETS.NORM", "FrozenBN")
NO_FPN = ("MODEL.BACKBONE.NAME", "build_gw_resnet_backbone")


def positions(value):
    return ("MODEL.RESNETS.WHITEN_POSITIONS", value)


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


@pytest.mark.parametrize(
    ("opts", "name", "norms"),
    [
        ((), "resnet18", 9),
        ((("MODEL.RESNETS.WHITEN_NORM", "GW:groups=16,solver=zca_max,threshold=0.3,corr=true"),), "resnet18", 9),
        ((("MODEL.RESNETS.NORM", "GN"), positions("")), "resnet18", 20),
        ((*R50, FROZEN, positions("S1-B3")), "resnet50", 17),
        ((*X50, ("MODEL.RESNETS.NORM", "GN:groups=16"), positions("ALL")), "resnext50_32x4d", 53),
    ],
)
def test_torchvision_layout(tmp_path, normalization, opts, name, norms):
    backbone, path = backbone_of(*opts), tmp_path / "out" / "backbone.safetensors"
    report = export_backbone(backbone, path.parent, normalization, file_format="safetensors", layout="torchvision")
    assert len(report["cases"]) == 4 and report["worst_relative"] < 1e-4
    # as a user does: torchvision's own constructor, with the norm layers that the header names
    weights, model = load_file(path), torchvision.models.get_model(name)
    model.fc = torch.nn.Identity()
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["norms"])
    assert len(header) == norms
    for layer, spec in header.items():
        model.set_submodule(layer, get_norm(resolve_norm(spec), weights[f"{layer}.weight"].numel()))
    model.load_state_dict(weights)
    images = torch.randn(2, 3, 75, 97)
    with torch.no_grad():
        expected = backbone.eval()(images)["res5"].mean((2, 3))
        found = model.eval()(images)
    assert ((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_detectron2_layout(tmp_path, normalization):
    backbone = backbone_of(fpn=True)
    report = export_backbone(backbone, tmp_path / "fpn", normalization, file_format="safetensors")
    weights = load_file(tmp_path / "fpn" / "backbone.safetensors")
    assert weights.keys() == backbone.state_dict().keys()
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in weights.items())
    assert report["worst_relative"] == 0
    export_backbone(backbone, tmp_path / "resnet", normalization, file_format="safetensors", fpn=False)
    conversion = load_weights(tmp_path / "resnet" / "backbone.safetensors")  # as MODEL.WEIGHTS gw://file/ does
    assert (conversion.architecture.name, conversion.positions.positions) == ("R-18", "S1-B2")


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        ((*R50, ("MODEL.RESNETS.STRIDE_IN_1X1", True)), r"STRIDE_IN_1X1"),
        ((*R50, NO_FPN, ("MODEL.RESNETS.RES5_DILATION", 2)), r"RES5_DILATION .*res5.2 is dilated"),
        ((*R50, ("MODEL.RESNETS.STEM_OUT_CHANNELS", 32)), r"torchvision's R-50 does not take these weights"),
    ],
)
def test_torchvision_refuses_other_functions(tmp_path, normalization, opts, message):
    extractor = FeatureExtractor(backbone_of(*opts), normalization)
    with pytest.raises(ExportError, match=message):
        write_safetensors(extractor, tmp_path / "a.safetensors", "torchvision")
    write_safetensors(extractor, tmp_path / "a.safetensors")


@pytest.mark.parametrize("layout", ["detectron2", "torchvision"])
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
def test_norms_come_back(tmp_path, normalization, layout, norm, whitening, where):
    opts = (("MODEL.RESNETS.NORM", norm), ("MODEL.RESNETS.WHITEN_NORM", whitening), positions(where))
    backbone = backbone_of(*opts, ("MODEL.BACKBONE.FREEZE_AT", 2))
    path = tmp_path / "a.safetensors"
    write_safetensors(FeatureExtractor(backbone, normalization), path, layout)
    conversion = load_weights(path)
    assert conversion.preprocessing == Preprocessing("RGB", *PIXELS, False)
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


@pytest.mark.parametrize("layout", ["detectron2", "torchvision"])
def test_preprocessing_comes_back(tmp_path, layout):
    images = Normalization("BGR", (1.0, 2.0, 3.0), (1.0, 1.0, 1.0))
    backbone = backbone_of(*R50, ("MODEL.RESNETS.STRIDE_IN_1X1", layout == "detectron2"))
    write_safetensors(FeatureExtractor(backbone, images), tmp_path / "a.safetensors", layout)
    assert load_weights(tmp_path / "a.safetensors").preprocessing == Preprocessing(
        "BGR", (1.0, 2.0, 3.0), (1.0, 1.0, 1.0), layout == "detectron2"
    )


def test_dilated_network_does_not_come_back(tmp_path, normalization):
    backbone = backbone_of(*R50, NO_FPN, ("MODEL.RESNETS.RES5_DILATION", 2), ("MODEL.RESNETS.STRIDE_IN_1X1", False))
    write_safetensors(FeatureExtractor(backbone, normalization), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"res5: the network is dilated"):
        load_weights(tmp_path / "a.safetensors")
