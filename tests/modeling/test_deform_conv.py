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


def deformable(kind, groups=1, stride=1, dilation=1):
    geometry = {"stride": stride, "padding": dilation, "dilation": dilation}
    conv = kind(4, 6, 3, deformable_groups=groups, bias=False, **geometry)
    return conv.double()


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
def test_output_is_that_of_detectron2(stride, dilation):
    conv = deformable(DeformConv, stride=stride, dilation=dilation)
    geometry = {"stride": stride, "padding": dilation, "dilation": dilation}
    size = F.conv2d(X, conv.weight, **geometry).shape[-2:]
    offset = torch.randn(2, 18, *size, dtype=torch.float64)
    expected = conv(X, offset)  # Detectron2 runs it on the CPU, but not backwards

    conv.__class__ = TorchvisionDeformConv

    assert torch.equal(conv(X, offset), expected)


@pytest.mark.parametrize(("kind", "masks"), [(DeformConv, 0), (ModulatedDeformConv, 1)])
def test_without_offsets_it_is_a_convolution_and_gradients_are_the_numeric_ones(
    kind, masks
):
    conv = deformable(kind, groups=2)
    conv.__class__ = TorchvisionDeformConv
    zero = torch.zeros(2, 36, 9, 11, dtype=torch.float64)
    halves = [torch.full((2, 18, 9, 11), 0.5, dtype=torch.float64)] * masks

    output = conv(X, zero, *halves)

    expected = 0.5**masks * F.conv2d(X, conv.weight, padding=1)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)

    inputs = [X[:1, :, :4, :4].clone(), torch.randn(1, 36, 4, 4, dtype=torch.float64)]
    inputs += [torch.rand(1, 18, 4, 4, dtype=torch.float64)] * masks
    for value in inputs:
        value.requires_grad_()
    assert torch.autograd.gradcheck(conv, inputs, fast_mode=True)


def test_pretrained_weights_load_and_the_offsets_start_new(cfg, tmp_path):
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 8
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 32
    plain = build_backbone(cfg).bottom_up.eval()
    file = tmp_path / "plain.pth"
    torch.save({"model": plain.state_dict(), "matching_heuristics": True}, file)
    cfg.MODEL.RESNETS.DEFORM_ON_PER_STAGE = [False, True, True, True]
    model = build_backbone(cfg)

    report = load_checkpoint(model, open_checkpoint(str(file)))

    assert report.missing == []
    offsets = {name for name in model.state_dict() if "conv2_offset" in name}
    assert offsets <= set(report.new)

    image = torch.randn(1, 3, 64, 64)
    deformable_resnet = model.bottom_up.eval()
    # offsets start at zero: the deformable network is the plain one
    with torch.no_grad():
        expected = plain(image)["res5"]
        output = deformable_resnet(image)["res5"]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
