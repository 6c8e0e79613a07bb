"""joint_statistics: the tiles of an image share its mean and whitening matrix."""

import copy
import pickle

import pytest
import torch
from torch import nn

from gw_detectron.layers import BatchRenorm2d, GroupWhitening2d, joint_statistics


def tiles_of(image, rows, columns):
    """Cut (1, C, H, W) into (rows * columns, C, H / rows, W / columns)."""
    _, c, h, w = image.shape
    cut = image.reshape(c, rows, h // rows, columns, w // columns)
    return cut.permute(1, 3, 0, 2, 4).reshape(rows * columns, c, h // rows, w // columns)


LAYERS = {
    "GW": lambda: GroupWhitening2d(16, 8),
    "GW_zca": lambda: GroupWhitening2d(16, 4, solver="zca"),
    "GN": lambda: nn.GroupNorm(4, 16),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_tiles_are_normalized_as_their_image(make, memory_format):
    torch.manual_seed(0)
    layer, image = make().double(), torch.randn(1, 16, 12, 20, dtype=torch.float64) * 3 + 1
    nn.init.normal_(layer.weight)
    image[..., 10:] *= 5  # tiles of different statistics
    tiles = tiles_of(image, 2, 2).to(memory_format=memory_format)
    expected = tiles_of(layer(image), 2, 2)
    alone = layer(tiles)
    with joint_statistics(layer):
        found = layer(tiles)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert (alone - expected).norm() > 0.1 * expected.norm()
    assert torch.equal(layer(tiles), alone)  # afterwards as before


def test_the_gradient_and_the_fused_relu_are_those_of_the_image():
    torch.manual_seed(0)
    layer = GroupWhitening2d(8, 4).double()
    image = torch.randn(1, 8, 6, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 8, 6, 10, dtype=torch.float64)
    (expected,) = torch.autograd.grad((layer(image, relu=True) * weight).sum(), image)
    with joint_statistics(layer):
        assert layer.fuses_relu
        y = layer(tiles_of(image, 3, 1), relu=True)
    (found,) = torch.autograd.grad((y * tiles_of(weight, 3, 1)).sum(), image)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert y.min() == 0


@pytest.mark.parametrize("samples", [0, 1])
def test_a_batch_of_one_or_no_tile_is_as_without(samples):
    layer, x = GroupWhitening2d(8, 4), torch.randn(samples, 8, 5, 5)
    with joint_statistics(layer):
        found = layer(x)
    assert torch.equal(found, layer(x))


def test_a_model_is_as_before_after_nested_contexts_and_errors():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), GroupWhitening2d(8, 4), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)).eval()
    x = torch.randn(2, 3, 9, 9)
    before = model(x)
    with pytest.raises(RuntimeError, match="stop"), joint_statistics(model):
        with joint_statistics(model):
            pass
        assert not torch.allclose(model(x), before)
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
        raise RuntimeError("stop")
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("model", [nn.BatchNorm2d(4), BatchRenorm2d(4), nn.Conv2d(3, 3, 3)])
def test_a_model_without_such_norms_is_refused(model):
    with pytest.raises(ValueError, match=r"no GroupWhitening2d or nn.GroupNorm. Fix: leave out joint"):
        joint_statistics(model).__enter__()
