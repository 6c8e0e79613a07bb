import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from torch import nn

from gw_detectron.layers import GroupWhitening2d
from gw_detectron.modeling import build_gw_resnet_backbone, gw_resnet
from gw_detectron.norms import whitened_convs
from gw_detectron.norms.listing import norm_rows

RGB = ShapeSpec(channels=3)


def set_depth(cfg, depth):
    cfg.MODEL.RESNETS.DEPTH = depth
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64 if depth < 50 else 256


def whitened_layers(model):
    return [row.layer for row in norm_rows(model) if row.spec.startswith("GW")]


@pytest.mark.parametrize(
    ("depth", "positions", "count"),
    # the counts of ResNet-50 are the paper's: 1, 17, 17, 17 and 33 GW modules
    [
        (50, "", 0),
        (50, "S1", 1),
        (50, "S1-B1", 17),
        (50, "S1-B2", 17),
        (50, "S1-B3", 17),
        (50, "S1-B12", 33),
    ]
    + [
        (50, "ALL", 53),
        (18, "S1", 1),
        (18, "S1-B1", 9),
        (18, "S1-B2", 9),
        (18, "S1-B12", 17),
        (18, "ALL", 20),
    ],
)
def test_the_whitening_norm_is_at_its_positions_only(cfg, depth, positions, count):
    set_depth(cfg, depth)
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = positions
    backbone = build_gw_resnet_backbone(cfg, RGB)
    whitened = whitened_layers(backbone)
    assert len(whitened) == count
    convs = whitened_convs(positions, bottleneck=depth >= 50)
    assert {name.split(".")[-2] for name in whitened} - {"conv1"} == set(convs) - {"conv1"}
    assert ("stem.conv1.norm" in whitened) == bool(positions)
    for row in norm_rows(backbone):
        assert row.spec.startswith("GW") == (row.layer in whitened)
        assert row.spec.startswith("GW") or row.spec == "BN"


@pytest.mark.parametrize("options", ["R-18", "R-50", "X-50", "stride_in_1x1", "res5_dilation"])
def test_without_whitening_it_is_the_stock_backbone(cfg, options):
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    if options == "R-18":
        set_depth(cfg, 18)
    elif options == "X-50":
        cfg.MODEL.RESNETS.NUM_GROUPS, cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 32, 4
    elif options == "stride_in_1x1":
        cfg.MODEL.RESNETS.STRIDE_IN_1X1 = True
    elif options == "res5_dilation":
        cfg.MODEL.RESNETS.RES5_DILATION = 2
    stock = BACKBONE_REGISTRY.get("build_resnet_backbone")(cfg, RGB).eval()
    ours = build_gw_resnet_backbone(cfg, RGB).eval()
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        expected, actual = stock(x), ours(x)
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name])


def test_freeze_at_keeps_whitening_and_stops_its_affine(cfg):
    set_depth(cfg, 18)
    cfg.MODEL.BACKBONE.FREEZE_AT = 2
    backbone = build_gw_resnet_backbone(cfg, RGB)
    for row in norm_rows(backbone):
        in_frozen_part = row.layer.startswith(("stem", "res2"))
        assert row.frozen == in_frozen_part
        if not row.spec.startswith("GW"):
            assert row.spec == ("FrozenBN" if in_frozen_part else "BN")
    assert isinstance(backbone.stem.conv1.norm, GroupWhitening2d)
    assert isinstance(backbone.res2[0].conv2.norm, GroupWhitening2d)
    assert isinstance(backbone.res2[0].conv1.norm, FrozenBatchNorm2d)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "WHITEN_POSITIONS",
            "S1-B4",
            r"WHITEN_POSITIONS \('S1-B4'\): .* Fix: use one of \['', 'S1'",
        ),
        (
            "WHITEN_NORM",
            "GW:groups=48",
            r"MODEL.RESNETS.WHITEN_NORM \('GW:groups=48'\): .* 64 channels",
        ),
        ("DEPTH", 51, r"MODEL.RESNETS.DEPTH \(51\): not one of 18, 34, 50, 101, 152\."),
        ("NORM", "XN", r"MODEL.RESNETS.NORM \('XN'\): unknown norm"),
    ],
)
def test_a_wrong_key_is_named(cfg, key, value, message):
    cfg.MODEL.RESNETS[key] = value
    with pytest.raises(ValueError, match=message):
        build_gw_resnet_backbone(cfg, RGB)


@pytest.mark.parametrize("depth", [18, 50])
def test_a_replaced_convolution_keeps_the_relu_behind_it(depth):
    """Stock blocks apply their ReLUs themselves, so a user may replace any of their convolutions."""
    backbone = gw_resnet(depth, freeze_at=0).eval()
    x = torch.rand(1, 3, 64, 64)
    expected = backbone(x)["res5"]
    convs = [backbone.stem.conv1] + [
        getattr(block, n) for block in backbone.res3 for n in block.relu_convs
    ]
    for module in [backbone.stem, *backbone.res3]:
        for name in module.relu_convs:
            conv = getattr(module, name)
            setattr(module, name, nn.Sequential(conv, conv.norm))
            conv.norm = conv.activation = None
    assert len(convs) == {18: 3, 50: 9}[depth] and not any(conv.activation for conv in convs)
    assert torch.allclose(backbone(x)["res5"], expected, rtol=1e-3, atol=1e-4)
