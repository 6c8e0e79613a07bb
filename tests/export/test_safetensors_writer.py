import importlib.util
import json
import sys
import types

import pytest
import torch
import torchvision
from detectron2.modeling import build_backbone
from safetensors import safe_open
from safetensors.torch import load_file

from gw_detectron.errors import ConfigError, ExportError
from gw_detectron.export import export_backbone
from gw_detectron.export.feature_extractor import FeatureExtractor, Normalization
from gw_detectron.export.safetensors_writer import write_safetensors
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.model_zoo import get_config, get_config_file
from gw_detectron.norms.norm_listing import norm_rows
from gw_detectron.weights import Preprocessing, convert, load_weights, to_torchvision
from gw_detectron.weights.metadata import read_notes
from gw_detectron.weights.norm_inference import evaluation_name
from gw_detectron.weights.reading import Contents
from gw_detectron.weights.reference_networks import config_for

DEMO = "quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml"


def backbone_of(*opts, fpn=False):
    cfg = get_config(DEMO)
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


PIXELS = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
R50 = (("MODEL.RESNETS.DEPTH", 50), ("MODEL.RESNETS.RES2_OUT_CHANNELS", 256))
X50 = (*R50, ("MODEL.RESNETS.NUM_GROUPS", 32), ("MODEL.RESNETS.WIDTH_PER_GROUP", 4))
FROZEN = ("MODEL.RESNETS.NORM", "FrozenBN")
PLAIN = ("MODEL.RESNETS.WHITEN_POSITIONS", "")
NO_FPN = ("MODEL.BACKBONE.NAME", "build_gw_resnet_backbone")


def positions(value):
    return ("MODEL.RESNETS.WHITEN_POSITIONS", value)


@pytest.mark.parametrize(
    ("opts", "norms"),
    [
        ((), 9),
        ((("MODEL.RESNETS.WHITEN_NORM", "GW:groups=16,solver=zca_max,threshold=0.3,corr=true"),), 9),
        ((PLAIN,), 0),
        ((("MODEL.RESNETS.NORM", "GN"), PLAIN), 20),
        ((*R50, FROZEN, positions("S1-B3")), 17),
        ((*X50, ("MODEL.RESNETS.NORM", "GN:groups=16"), positions("ALL")), 53),
    ],
)
def test_torchvision_layout(tmp_path, normalization, opts, norms):
    backbone = backbone_of(*opts)
    folder = tmp_path / "out"
    report = export_backbone(backbone, folder, normalization, file_format="safetensors", layout="torchvision")
    assert len(report["cases"]) == 4
    assert len(report["norms"]) == norms
    weights = load_file(folder / "backbone.safetensors")
    assert torch.equal(weights["layer2.0.downsample.0.weight"], backbone.res3[0].shortcut.weight)
    # as a user does: torchvision's own constructor, with the norm layers that the header names
    names = {"R-18": "resnet18", "R-50": "resnet50", "X-50-32x4d": "resnext50_32x4d"}
    model = torchvision.models.get_model(names[report["network"]["name"]])
    model.fc = torch.nn.Identity()
    with safe_open(folder / "backbone.safetensors", "pt") as file:
        header = json.loads(file.metadata()["norms"])
    for name, arguments in header.items():
        kind = {"GroupNorm": torch.nn.GroupNorm, "GroupWhitening2d": GroupWhitening2d}[arguments.pop("class")]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(**arguments))
    model.load_state_dict(weights)
    images = torch.randn(2, 3, 75, 97)
    with torch.no_grad():
        expected = backbone.eval()(images)["res5"].mean((2, 3))
        found = model.eval()(images)
    assert ((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_timm_layout(tmp_path, normalization, run_readme, monkeypatch):
    """timm and torchvision share tensor names; the README builds timm's ResNet."""
    backbone = backbone_of()
    for layout in ("torchvision", "timm"):
        export_backbone(backbone, tmp_path / layout, normalization, file_format="safetensors", layout=layout)
    weights, same = (load_file(tmp_path / layout / "backbone.safetensors") for layout in ("torchvision", "timm"))
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)

    if importlib.util.find_spec("timm") is None:  # torchvision's ResNet with the arguments of timm's
        resnet = torchvision.models.resnet

        def build(block, layers, *, cardinality, base_width):
            return resnet.ResNet(block, layers, groups=cardinality, width_per_group=base_width)

        fake = types.SimpleNamespace(ResNet=build, BasicBlock=resnet.BasicBlock)
        monkeypatch.setitem(sys.modules, "timm", types.ModuleType("timm"))
        monkeypatch.setitem(sys.modules, "timm.models", types.SimpleNamespace(resnet=fake))
    assert "(1, 512)" in run_readme(tmp_path / "timm")


def test_the_readme_of_torchvision_layout(tmp_path, normalization, run_readme):
    export_backbone(backbone_of(), tmp_path / "gw", normalization, file_format="safetensors", layout="torchvision")
    assert "(1, 512)" in run_readme(tmp_path / "gw")
    backbone = backbone_of(PLAIN)
    export_backbone(backbone, tmp_path / "bn", normalization, file_format="safetensors", layout="torchvision")
    assert "(1, 512)" in run_readme(tmp_path / "bn", forbid=("gw_detectron", "detectron2"))


def test_detectron2_layout(tmp_path, normalization, run_readme):
    backbone = backbone_of(fpn=True)
    report = export_backbone(backbone, tmp_path / "fpn", normalization, file_format="safetensors")
    weights = load_file(tmp_path / "fpn" / "backbone.safetensors")
    assert weights.keys() == backbone.state_dict().keys()
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in weights.items())
    assert report["worst_relative"] == 0
    assert "All keys matched" in run_readme(tmp_path / "fpn", get_config_file(DEMO))

    export_backbone(backbone, tmp_path / "alone", normalization, file_format="safetensors", fpn=False)
    conversion = load_weights(tmp_path / "alone" / "backbone.safetensors")  # as MODEL.WEIGHTS gw://file/ does
    assert (conversion.architecture.name, conversion.provenance.positions) == ("R-18", "S1-B2")


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        ((*R50, ("MODEL.RESNETS.STRIDE_IN_1X1", True)), r"STRIDE_IN_1X1 .*res3.0 has its stride in the 1x1"),
        ((*R50, NO_FPN, ("MODEL.RESNETS.RES5_DILATION", 2)), r"RES5_DILATION .*res5.0 is dilated"),
        ((*R50, ("MODEL.RESNETS.STEM_OUT_CHANNELS", 32)), r"torchvision's R-50 does not take these weights"),
    ],
)
def test_torchvision_refuses_other_functions(tmp_path, normalization, opts, message):
    with pytest.raises(ValueError, match=message):
        export_backbone(
            backbone_of(*opts), tmp_path / "out", normalization, file_format="safetensors", layout="torchvision"
        )
    assert list(tmp_path.iterdir()) == []
    export_backbone(backbone_of(*opts), tmp_path / "out", normalization, file_format="safetensors")


def test_fpn_and_pixels_are_refused(tmp_path, normalization):
    with pytest.raises(ValueError, match=r"timm's ResNet has no FPN. .*--no-fpn"):
        export_backbone(
            backbone_of(fpn=True), tmp_path / "out", normalization, file_format="safetensors", layout="timm"
        )
    takes_pixels = type(normalization)(normalization.channels, normalization.pixel_mean, normalization.pixel_std, True)
    with pytest.raises(ValueError, match="cannot normalize pixels"):
        export_backbone(backbone_of(), tmp_path / "out", takes_pixels, file_format="safetensors")


def test_features_keep_the_order_of_their_names(normalization):
    backbone = backbone_of(NO_FPN, ("MODEL.RESNETS.OUT_FEATURES", ["res5", "stem", "res3"]))
    features = FeatureExtractor(backbone, normalization)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = backbone.eval()(images)
        for name, found in zip(features.names, features(images), strict=True):
            assert torch.equal(found, expected[name])


ROUND_TRIPS = [
    ("BN", "GW", "S1-B2"),
    ("FrozenBN", "GW:groups=32", "S1"),
    ("FrozenBN", "GW:iters=3,eps=1e-3", "ALL"),
    ("FrozenBN", "GW:groups=128,solver=zca", "S1-B1"),
    ("GN", "GW", ""),
    ("GN:groups=64", "GW", "S1-B2"),
    ("GN:groups=1", "GN:groups=16", "S1"),
    ("FrozenBN", "BW:channels=32,solver=zca", "S1-B2"),
    ("SyncBN", "BW:running=covariance,corr=true", "ALL"),
    ("BN", "BN:rotation=cayley", "S1"),
    ("LN", "GW", "S1-B2"),
]


@pytest.mark.parametrize("layout", ["detectron2", "timm"])
@pytest.mark.parametrize(("norm", "whitening", "where"), ROUND_TRIPS)
def test_norms_come_back_or_are_refused(tmp_path, normalization, layout, norm, whitening, where):
    opts = (("MODEL.RESNETS.NORM", norm), ("MODEL.RESNETS.WHITEN_NORM", whitening), positions(where))
    try:
        backbone = backbone_of(*opts, ("MODEL.BACKBONE.FREEZE_AT", 2))
    except ConfigError:
        assert norm == "LN"
        pytest.skip("this Detectron2 has no LN")
    path = tmp_path / "a.safetensors"
    try:
        write_safetensors(FeatureExtractor(backbone, normalization), path, layout)
    except ExportError:
        assert layout != "detectron2"  # torchvision's names have GN and GW only
        assert whitening.startswith("B") or norm == "LN"
        return
    provenance = load_weights(path).provenance
    assert provenance.preprocessing == Preprocessing("RGB", *(tuple(v) for v in PIXELS), False)
    cfg = config_for(provenance)
    cfg.MODEL.BACKBONE.update({"NAME": "build_gw_resnet_backbone", "FREEZE_AT": 0})
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res5"]
    restored = build_backbone(cfg)
    expected, found = (
        {row.layer: evaluation_name(row.spec, row.channels) for row in norm_rows(model)}
        for model in (backbone, restored)
    )
    assert found == expected
    with pytest.raises(ValueError, match="the weights have"):
        load_weights(path, norm="GN:groups=2")


@pytest.mark.parametrize("layout", ["detectron2", "torchvision"])
def test_preprocessing_comes_back(tmp_path, layout):
    images = Normalization("BGR", (1.0, 2.0, 3.0), (1.0, 1.0, 1.0))
    backbone = backbone_of(*R50, ("MODEL.RESNETS.STRIDE_IN_1X1", layout == "detectron2"))
    write_safetensors(FeatureExtractor(backbone, images), tmp_path / "a.safetensors", layout)
    facts = load_weights(tmp_path / "a.safetensors").provenance
    assert facts.preprocessing == Preprocessing("BGR", (1.0, 2.0, 3.0), (1.0, 1.0, 1.0), layout == "detectron2")


def test_dilated_network_does_not_come_back(tmp_path, normalization):
    backbone = backbone_of(*R50, NO_FPN, ("MODEL.RESNETS.RES5_DILATION", 2), ("MODEL.RESNETS.STRIDE_IN_1X1", False))
    write_safetensors(FeatureExtractor(backbone, normalization), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"res5 .stride 16.: the network is dilated"):
        load_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "norms", ["{", *(json.dumps({"stem.conv1.norm": norm}) for norm in (3, "GW", {"class": "Conv2d"}))]
)
def test_damaged_norms_are_refused(norms):
    tensors = to_torchvision(backbone_of().state_dict())
    contents = Contents(tensors, {"layout": "detectron2", "norms": norms}, "safetensors")
    with pytest.raises(ValueError, match="(notes of the file: damaged|the file lists none).*Fix: "):
        convert(tensors, notes=read_notes(contents))
