import json

import pytest
import torch
import torchvision
from detectron2.modeling import build_backbone
from safetensors import safe_open
from safetensors.torch import load_file

from gw_detectron.checkpoint import load_weights
from gw_detectron.export import export_backbone
from gw_detectron.export.features import Features
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.model_zoo import get_config, get_config_file

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
def test_torchvision_layout(tmp_path, normalisation, opts, norms):
    backbone = backbone_of(*opts)
    folder = tmp_path / "out"
    report = export_backbone(backbone, folder, normalisation, file_format="safetensors", layout="torchvision")
    assert len(report["cases"]) == 4
    assert len(report["norms"]) == norms
    weights = load_file(folder / "backbone.safetensors")
    assert torch.equal(weights["layer2.0.downsample.0.weight"], backbone.res3[0].shortcut.weight)
    # the way of a user: torchvision's own constructor, and its norms replaced as the header says
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


def test_timm_has_the_names_of_torchvision(tmp_path, normalisation):
    backbone = backbone_of()
    for layout in ("torchvision", "timm"):
        export_backbone(backbone, tmp_path / layout, normalisation, file_format="safetensors", layout=layout)
    weights, same = (load_file(tmp_path / layout / "backbone.safetensors") for layout in ("torchvision", "timm"))
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert "timm.models.resnet" in (tmp_path / "timm" / "README.md").read_text()


def test_the_readme_of_torchvision_layout(tmp_path, normalisation, run_readme):
    export_backbone(backbone_of(), tmp_path / "gw", normalisation, file_format="safetensors", layout="torchvision")
    assert "(1, 512)" in run_readme(tmp_path / "gw")
    backbone = backbone_of(PLAIN)
    export_backbone(backbone, tmp_path / "bn", normalisation, file_format="safetensors", layout="torchvision")
    assert "(1, 512)" in run_readme(tmp_path / "bn", forbid=("gw_detectron", "detectron2"))


def test_detectron2_layout(tmp_path, normalisation, run_readme):
    backbone = backbone_of(fpn=True)
    report = export_backbone(backbone, tmp_path / "fpn", normalisation, file_format="safetensors")
    weights = load_file(tmp_path / "fpn" / "backbone.safetensors")
    assert weights.keys() == backbone.state_dict().keys()
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in weights.items())
    assert report["worst_relative"] == 0
    assert f"{len(weights)} tensors loaded" in run_readme(tmp_path / "fpn", get_config_file(DEMO))

    export_backbone(backbone, tmp_path / "alone", normalisation, file_format="safetensors", fpn=False)
    conversion = load_weights(tmp_path / "alone" / "backbone.safetensors")  # what MODEL.WEIGHTS gw://file/ does
    assert (conversion.architecture.name, conversion.positions) == ("R-18", "S1-B2")


@pytest.mark.parametrize(
    ("opts", "message"),
    [
        ((*R50, ("MODEL.RESNETS.STRIDE_IN_1X1", True)), r"res3.0 has its stride in the 1x1 .*STRIDE_IN_1X1"),
        ((*R50, NO_FPN, ("MODEL.RESNETS.RES5_DILATION", 2)), r"res5.0 is dilated .*RES5_DILATION"),
        ((*R50, ("MODEL.RESNETS.STEM_OUT_CHANNELS", 32)), r"torchvision's R-50 does not take these weights"),
    ],
)
def test_what_torchvision_cannot_be(tmp_path, normalisation, opts, message):
    with pytest.raises(ValueError, match=message):
        export_backbone(
            backbone_of(*opts), tmp_path / "out", normalisation, file_format="safetensors", layout="torchvision"
        )
    assert list(tmp_path.iterdir()) == []
    export_backbone(backbone_of(*opts), tmp_path / "out", normalisation, file_format="safetensors")


def test_fpn_and_pixels_are_refused(tmp_path, normalisation):
    with pytest.raises(ValueError, match=r"timm's ResNet has no FPN; .*--no-fpn"):
        export_backbone(
            backbone_of(fpn=True), tmp_path / "out", normalisation, file_format="safetensors", layout="timm"
        )
    takes_pixels = type(normalisation)(normalisation.channels, normalisation.pixel_mean, normalisation.pixel_std, True)
    with pytest.raises(ValueError, match="cannot normalise pixels"):
        export_backbone(backbone_of(), tmp_path / "out", takes_pixels, file_format="safetensors")


def test_features_keep_the_order_of_their_names(normalisation):
    backbone = backbone_of(NO_FPN, ("MODEL.RESNETS.OUT_FEATURES", ["res5", "stem", "res3"]))
    features = Features(backbone, normalisation)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = backbone.eval()(images)
        for name, found in zip(features.names, features(images), strict=True):
            assert torch.equal(found, expected[name])
