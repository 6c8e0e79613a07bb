import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling.backbone import build_resnet_backbone
from torch import nn

from gw_detectron.errors import ConfigError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.modeling import build_gw_resnet_backbone, gw_resnet
from gw_detectron.norms import whitened_convs
from gw_detectron.norms.listing import norm_rows

RGB = ShapeSpec(channels=3)


@pytest.mark.parametrize(
    ("positions", "count"),
    # the paper's counts: 1, 17, 17, 17 and 33 GW modules
    [
        ("", 0),
        ("S1", 1),
        ("S1-B1", 17),
        ("S1-B2", 17),
        ("S1-B3", 17),
        ("S1-B12", 33),
        ("ALL", 53),
    ],
)
def test_the_whitening_norm_is_at_its_positions_only(cfg, positions, count):
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = positions

    check_positions(
        build_gw_resnet_backbone(cfg, RGB), whitened_convs(positions), count
    )


@pytest.mark.parametrize(
    ("positions", "count"),
    [("S1", 1), ("S1-B1", 9), ("S1-B2", 9), ("S1-B12", 17), ("ALL", 20)],
)
def test_the_same_in_a_resnet_of_basic_blocks(resnet18, positions, count):
    resnet18.MODEL.RESNETS.WHITEN_POSITIONS = positions
    convs = whitened_convs(positions, bottleneck=False)

    check_positions(build_gw_resnet_backbone(resnet18, RGB), convs, count)


def check_positions(backbone, convs, count):
    whitened = []
    for row in norm_rows(backbone):
        if row.spec.startswith("GW"):
            whitened.append(row.layer)
        else:
            assert row.spec == "BN"

    assert len(whitened) == count
    assert ("stem.conv1.norm" in whitened) == bool(count)
    in_blocks = {
        name.split(".")[-2] for name in whitened if not name.startswith("stem")
    }
    assert in_blocks == set(convs)


@pytest.mark.parametrize(
    "options",
    [
        {"DEPTH": 18, "RES2_OUT_CHANNELS": 64},
        {},
        {"NUM_GROUPS": 32, "WIDTH_PER_GROUP": 4},
        {"STRIDE_IN_1X1": True},
        {"RES5_DILATION": 2},
    ],
)
def test_without_whitening_it_is_the_stock_backbone(cfg, options):
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    cfg.MODEL.RESNETS.update(options)
    stock = build_resnet_backbone(cfg, RGB).eval()
    ours = build_gw_resnet_backbone(cfg, RGB).eval()
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(1, 3, 64, 96)

    with torch.no_grad():
        expected = stock(x)
        features = ours(x)

    assert expected.keys() == features.keys()
    for name, feature in features.items():
        assert torch.equal(feature, expected[name])


def test_freeze_at_keeps_whitening_and_stops_its_affine(resnet18):
    resnet18.MODEL.BACKBONE.FREEZE_AT = 2

    backbone = build_gw_resnet_backbone(resnet18, RGB)

    for row in norm_rows(backbone):
        is_frozen = row.layer.startswith(("stem", "res2"))
        assert row.frozen == is_frozen
        if not row.spec.startswith("GW"):
            assert row.spec == ("FrozenBN" if is_frozen else "BN")
    block = backbone.res2[0]
    assert isinstance(backbone.stem.conv1.norm, GroupWhitening2d)
    assert isinstance(block.conv1.norm, FrozenBatchNorm2d)
    assert isinstance(block.conv2.norm, GroupWhitening2d)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("WHITEN_POSITIONS", "S1-B4", r"WHITEN_POSITIONS \('S1-B4'\): .*'S1'"),
        (
            "WHITEN_NORM",
            "GW:groups=48",
            r"MODEL.RESNETS.WHITEN_NORM \('GW:groups=48'\): .*64",
        ),
        ("DEPTH", 51, r"MODEL.RESNETS.DEPTH \(51\): .*152"),
        ("NORM", "XN", r"MODEL.RESNETS.NORM \('XN'\): "),
    ],
)
def test_a_wrong_key_is_named(cfg, key, value, message):
    cfg.MODEL.RESNETS[key] = value

    with pytest.raises(ConfigError, match=message):
        build_gw_resnet_backbone(cfg, RGB)


@pytest.mark.parametrize(("depth", "count"), [(18, 3), (50, 9)])
def test_a_replaced_convolution_keeps_the_relu_behind_it(depth, count):
    """Stock blocks apply their ReLUs themselves, so a user may replace any of their convolutions."""
    backbone = gw_resnet(depth, freeze_at=0).eval()
    x = torch.rand(1, 3, 64, 64)
    expected = backbone(x)["res5"]
    replaced = 0

    for block in [backbone.stem, *backbone.res3]:
        for name in block.relu_convs:
            conv = getattr(block, name)
            setattr(block, name, nn.Sequential(conv, conv.norm))
            conv.norm = None
            conv.activation = None
            replaced += 1

    output = backbone(x)["res5"]
    assert replaced == count
    assert torch.allclose(output, expected, rtol=1e-3, atol=1e-4)
