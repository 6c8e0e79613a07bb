"""Deformable blocks by torchvision's operator: the same function as Detectron2's, and gradients on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from detectron2.modeling import build_backbone

from gw_detectron.weights import load_checkpoint, open_checkpoint

try:
    from detectron2.layers import DeformConv, ModulatedDeformConv

    DeformConv(4, 4, 3)
except ImportError as error:
    pytest.skip(f"this Detectron2 was not compiled: {error}", allow_module_level=True)

from gw_detectron.modeling.convs import TorchvisionDeformConv

X = torch.randn(2, 4, 9, 11, dtype=torch.float64)


def conv_and_offset(kind, groups=1, stride=1, dilation=1):
    conv = kind(
        4,
        6,
        3,
        stride=stride,
        padding=dilation,
        dilation=dilation,
        deformable_groups=groups,
        bias=False,
    )
    conv.double()
    size = F.conv2d(X, conv.weight, stride=stride, padding=dilation, dilation=dilation).shape[
        -2:
    ]
    return conv, torch.randn(2, 18 * groups, *size, dtype=torch.float64)


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
def test_output_is_that_of_detectron2(stride, dilation):
    conv, offset = conv_and_offset(DeformConv, stride=stride, dilation=dilation)
    expected = conv(X, offset)  # Detectron2 runs it on the CPU, but not backwards
    conv.__class__ = TorchvisionDeformConv
    assert torch.equal(conv(X, offset), expected)


@pytest.mark.parametrize("kind", [DeformConv, ModulatedDeformConv])
def test_without_offsets_it_is_a_convolution_and_gradients_are_the_numeric_ones(kind):
    conv, offset = conv_and_offset(kind, groups=2)
    conv.__class__ = TorchvisionDeformConv
    mask = [torch.full_like(offset[:, :18], 0.5)] if kind is ModulatedDeformConv else []
    scale = 0.5 if mask else 1.0
    found = conv(X, torch.zeros_like(offset), *mask)
    torch.testing.assert_close(
        found, scale * F.conv2d(X, conv.weight, padding=1), rtol=1e-10, atol=1e-10
    )
    inputs = [X[:1, :, :4, :4].clone(), offset[:1, :, :4, :4].clone()]
    inputs += (
        [torch.rand(1, 18, 4, 4, dtype=torch.float64)] if kind is ModulatedDeformConv else []
    )
    assert torch.autograd.gradcheck(
        conv, [value.requires_grad_() for value in inputs], fast_mode=True
    )


def test_pretrained_weights_load_and_the_offsets_start_new(cfg, tmp_path):
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 8, 32
    plain = build_backbone(cfg)
    state = {
        name: value
        for name, value in plain.state_dict().items()
        if name.startswith("bottom_up.")
    }
    torch.save({"model": state, "matching_heuristics": True}, tmp_path / "plain.pth")
    cfg.MODEL.RESNETS.DEFORM_ON_PER_STAGE = [False, True, True, True]
    model = build_backbone(cfg)
    report = load_checkpoint(model, open_checkpoint(str(tmp_path / "plain.pth")))
    assert report.missing == []
    assert {name for name in report.new if "conv2_offset" in name} == {
        name for name in model.state_dict() if "conv2_offset" in name
    }
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():  # offsets start at zero: the deformable network is the plain one
        expected, found = (
            plain.eval().bottom_up(image)["res5"],
            model.eval().bottom_up(image)["res5"],
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
