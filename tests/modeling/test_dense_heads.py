"""Dense heads against Detectron2's with the same weights, and norm names in their constructors."""

from typing import Any

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone, build_model
from detectron2.modeling.meta_arch.fcos import FCOS
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.meta_arch.semantic_seg import SemSegFPNHead
from detectron2.utils.events import EventStorage
from torch import nn

from gw_detectron.errors import NormError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.modeling import (
    GWFCOSHead,
    GWRetinaNet,
    GWRetinaNetHead,
    GWSemSegFPNHead,
)
from gw_detectron.norms.listing import norm_rows

from ..test_configs import tiny_batch

LEVELS = {f"p{level}": ShapeSpec(channels=16, stride=2**level) for level in (2, 3, 4)}
FEATURES = {
    name: torch.randn(2, 16, 64 // shape.stride, 64 // shape.stride)
    for name, shape in LEVELS.items()
}
#: ours, the stock head, its arguments, its input, and the method that computes
HEADS: dict[str, tuple[type[nn.Module], type[nn.Module], dict[str, Any], Any, str]] = {
    "retinanet": (
        GWRetinaNetHead,
        RetinaNetHead,
        {
            "input_shape": [*LEVELS.values()],
            "conv_dims": [16, 16],
            "num_classes": 3,
            "num_anchors": 2,
        },
        list(FEATURES.values()),
        "forward",
    ),
    "semantic": (
        GWSemSegFPNHead,
        SemSegFPNHead,
        {"input_shape": LEVELS, "conv_dims": 16, "num_classes": 3, "common_stride": 4},
        FEATURES,
        "layers",
    ),
}


def small_norm(norm: str) -> Any:
    """Return a function that Detectron2 takes as a norm; v0.6 tries one channel first."""

    def layer(channels: int) -> nn.Module:
        if norm.startswith("GW"):
            return GroupWhitening2d(channels, num_groups=4)
        return nn.GroupNorm(min(8, channels), channels)

    return layer if norm else ""


@pytest.mark.parametrize("norm", ["", "GN:groups=8", "GW:groups=4"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_the_stock_head_with_that_norm(kind, norm):
    ours, stock, arguments, features, method = HEADS[kind]
    head = ours(**arguments, norm=norm)
    reference = stock(**arguments, norm=small_norm(norm))
    head.load_state_dict(reference.state_dict())  # raises unless all names are the same

    outputs = getattr(head, method)(features)
    expected = getattr(reference, method)(features)

    assert isinstance(head, stock)
    assert len(norm_rows(head)) == (4 if norm else 0)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("norm", "word"),
    [("GX", "unknown norm"), ("GW:groups=5", "5"), ("GN:groups=0", "groups")],
)
@pytest.mark.parametrize("kind", HEADS)
def test_a_wrong_norm_names_the_class_and_its_key(kind, norm, word):
    ours, _, arguments, *_ = HEADS[kind]

    with pytest.raises(
        NormError, match=rf"{ours.__name__}, \S*(?i:norm) \('{norm}'\): .*{word}"
    ):
        ours(**arguments, norm=norm)


@pytest.fixture
def retinanet(resnet18):
    model = resnet18.MODEL
    model.META_ARCHITECTURE = "GWRetinaNet"
    model.BACKBONE.NAME = "build_gw_retinanet_resnet_fpn_backbone"
    model.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
    model.FPN.IN_FEATURES = ["res3", "res4", "res5"]
    model.FPN.OUT_CHANNELS = 64
    return resnet18


def test_retinanet_is_the_stock_one_with_the_norm_in_its_head(retinanet):
    retinanet.MODEL.RETINANET.NORM = "FrozenBN"
    ours = build_model(retinanet).eval()
    retinanet.MODEL.META_ARCHITECTURE = "RetinaNet"
    stock = build_model(retinanet).eval()
    ours.load_state_dict(stock.state_dict())
    image = {"image": torch.rand(3, 64, 64) * 255}

    (output,) = ours([image])
    (expected,) = stock([image])

    boxes, expected_boxes = output["instances"], expected["instances"]
    assert isinstance(ours, GWRetinaNet)
    assert torch.equal(boxes.pred_boxes.tensor, expected_boxes.pred_boxes.tensor)
    assert torch.equal(boxes.scores, expected_boxes.scores)


@pytest.mark.parametrize("norm", ["GW:groups=4", "GN:groups=8"])
def test_fcos_trains_and_evaluates(retinanet, norm):
    backbone = build_backbone(retinanet)
    shapes = backbone.output_shape()
    head = GWFCOSHead(
        input_shape=list(shapes.values()), num_classes=6, conv_dims=[64, 64], norm=norm
    )
    model = FCOS(
        backbone=backbone,
        head=head,
        head_in_features=list(shapes),
        num_classes=6,
        pixel_mean=retinanet.MODEL.PIXEL_MEAN,
        pixel_std=retinanet.MODEL.PIXEL_STD,
    )

    with EventStorage():
        losses = model.train()(tiny_batch(6))
    sum(losses.values()).backward()

    assert len(norm_rows(head)) == 4
    for name, value in head.named_parameters():
        assert value.grad.isfinite().all(), name

    image = {"image": torch.rand(3, 64, 64) * 255, "height": 64, "width": 64}
    with torch.no_grad():
        (result,) = model.eval()([image])
    assert result["instances"].has("pred_boxes")
