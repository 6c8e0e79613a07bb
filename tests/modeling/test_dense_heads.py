"""Dense heads against Detectron2's with the same weights, and norm names in their constructors."""

from typing import Any

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import RetinaNet, build_backbone, build_model
from detectron2.modeling.meta_arch.fcos import FCOS
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.meta_arch.semantic_seg import SemSegFPNHead
from detectron2.utils.events import EventStorage
from torch import nn

from gw_detectron.errors import NormError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.modeling import GWFCOSHead, GWRetinaNet, GWRetinaNetHead, GWSemSegFPNHead
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


def outputs(head: nn.Module, method: str, features: Any) -> list[torch.Tensor]:
    found = getattr(head, method)(features)
    return [found] if torch.is_tensor(found) else [*found[0], *found[1]]


@pytest.mark.parametrize("norm", ["", "GN:groups=8", "GW:groups=4"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_the_stock_head_with_that_norm(kind, norm):
    ours, stock, arguments, features, method = HEADS[kind]

    def layer(channels):  # Detectron2 v0.6 tries one channel first
        if norm.startswith("GW"):
            return GroupWhitening2d(channels, num_groups=4)
        return nn.GroupNorm(min(8, channels), channels)

    head, reference = (
        ours(**arguments, norm=norm),
        stock(**arguments, norm=layer if norm else ""),
    )
    assert isinstance(head, stock)
    head.load_state_dict(reference.state_dict())  # raises unless all names are the same
    for found, expected in zip(
        outputs(head, method, features), outputs(reference, method, features), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(norm_rows(head)) == (0 if not norm else 4)


@pytest.mark.parametrize("kind", HEADS)
def test_a_wrong_norm_names_the_argument_and_the_class(kind):
    ours, _, arguments, *_ = HEADS[kind]
    for norm, words in (
        ("GX", "unknown norm"),
        ("GW:groups=5", "5"),
        ("GN:groups=0", "groups"),
    ):
        with pytest.raises(NormError, match=rf"{ours.__name__}, norm \('{norm}'\): .*{words}"):
            ours(**arguments, norm=norm)


@pytest.fixture
def retinanet(cfg):
    cfg.MODEL.META_ARCHITECTURE = "GWRetinaNet"
    cfg.MODEL.BACKBONE.NAME = "build_gw_retinanet_resnet_fpn_backbone"
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.RESNETS.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.FPN.OUT_CHANNELS = 64
    return cfg


def test_retinanet_is_the_stock_one_with_the_norm_in_its_head(retinanet):
    retinanet.MODEL.RETINANET.NORM = "FrozenBN"
    ours = build_model(retinanet).eval()
    retinanet.MODEL.META_ARCHITECTURE = "RetinaNet"
    stock = build_model(retinanet).eval()
    ours.load_state_dict(stock.state_dict())
    assert isinstance(ours, RetinaNet) and isinstance(ours, GWRetinaNet)
    image = [{"image": torch.rand(3, 64, 64) * 255}]
    found, expected = (model(image)[0]["instances"] for model in (ours, stock))
    assert torch.equal(found.pred_boxes.tensor, expected.pred_boxes.tensor)
    assert torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("norm", ["GW:groups=4", "GN:groups=8"])
def test_fcos_trains_and_evaluates(retinanet, norm):
    backbone = build_backbone(retinanet)
    shapes = [*backbone.output_shape().values()]
    head = GWFCOSHead(input_shape=shapes, num_classes=6, conv_dims=[64, 64], norm=norm)
    pixels = {"pixel_mean": retinanet.MODEL.PIXEL_MEAN, "pixel_std": retinanet.MODEL.PIXEL_STD}
    names = [*backbone.output_shape()]
    model = FCOS(backbone=backbone, head=head, head_in_features=names, num_classes=6, **pixels)
    assert len(norm_rows(head)) == 4
    with EventStorage():
        losses = model.train()(tiny_batch(6))
    sum(losses.values()).backward()
    assert [
        name for name, value in head.named_parameters() if not value.grad.isfinite().all()
    ] == []
    with torch.no_grad():
        (result,) = model.eval()(
            [{"image": torch.rand(3, 64, 64) * 255, "height": 64, "width": 64}]
        )
    assert result["instances"].has("pred_boxes")
