"""Weight Standardization: the authors' formula, on any convolution, in every way that a model is used."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from torch import nn

from gw_detectron.layers import (
    GroupWhitening2d,
    standardize_weight,
    standardize_weights,
)
from gw_detectron.modeling import ConvNormReLU

from ..modeling.test_conv_norm_relu import COPIES
from ..ops.cases import assert_close, randn


def oracle(weight: torch.Tensor) -> torch.Tensor:
    """In numpy: divisor I - 1, eps outside of the root."""
    filters = weight.detach().double().numpy().reshape(len(weight), -1)
    centered = filters - filters.mean(1, keepdims=True)
    variance = np.square(centered).sum(1, keepdims=True) / (filters.shape[1] - 1)
    scaled = centered / (np.sqrt(variance) + 1e-5)
    return torch.from_numpy(scaled).reshape(weight.shape)


def conv(
    cls: type[nn.Conv2d] = nn.Conv2d, norm: nn.Module | None = None, **options
) -> nn.Module:
    torch.manual_seed(0)
    if cls is not nn.Conv2d:
        options |= {"norm": norm or nn.GroupNorm(2, 8), "activation": nn.ReLU()}
    return cls(4, 8, 3, **options)


def images() -> torch.Tensor:
    return randn(2, 4, 7, 6, seed=1)


@pytest.mark.parametrize("shape", [(3, 4, 3, 3), (5, 7, 1, 1), (2, 1, 3, 3), (4, 6, 3)])
def test_formula(shape):
    weight = randn(*shape, dtype=torch.float64) * 1e-3 + 1
    assert_close(standardize_weight(weight), oracle(weight))


def test_a_constant_filter_is_zero_and_its_gradient_finite():
    weight = torch.ones(2, 3, 3, 3, requires_grad=True)

    result = standardize_weight(weight)
    result.square().sum().backward()

    assert not result.any()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("cls", [nn.Conv2d, Conv2d, ConvNormReLU])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"groups": 2, "bias": False}], ids=str
)
def test_a_convolution_keeps_all_but_its_weight(cls, options):
    layer = conv(cls, **options)
    before = copy.deepcopy(layer)
    plain = copy.deepcopy(layer)
    plain.weight = nn.Parameter(oracle(layer.weight).float())

    assert standardize_weights(layer) == [""]

    torch.testing.assert_close(layer(images()), plain(images()))
    assert isinstance(layer, cls)
    for of in (nn.Module.state_dict, lambda module: dict(module.named_parameters())):
        assert list(of(layer)) == list(of(before))
        assert all(map(torch.equal, of(layer).values(), of(before).values()))


def test_group_whitening_still_fuses_the_relu():
    layer = conv(ConvNormReLU, GroupWhitening2d(8, 4))
    convolved = F.conv2d(images(), oracle(layer.weight).float(), layer.bias)
    expected = F.relu(layer.norm(convolved))
    calls = []
    layer.norm.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True
    )

    standardize_weights(layer)

    torch.testing.assert_close(layer(images()), expected)
    assert calls == [{"relu": True}]


def test_training_moves_the_weight_itself():
    layer = conv()
    standardize_weights(layer)
    weight = next(layer.parameters())
    before = weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    layer(images()).square().sum().backward()
    optimizer.step()

    # the output does not depend on the filters' means, and hardly on their scale
    means = weight.grad.mean((1, 2, 3))
    assert means.abs().max() < 1e-5 * weight.grad.abs().max()
    assert not torch.equal(weight, before)
    torch.testing.assert_close(layer.weight, oracle(weight).float())


def test_which_convolutions():
    model = nn.ModuleDict(
        {
            "torch": nn.Conv2d(4, 8, 3),
            "normed": Conv2d(4, 8, 3, norm=nn.GroupNorm(2, 8)),
            "bare": Conv2d(4, 8, 3),
            "up": nn.ConvTranspose2d(4, 8, 3),
            "line": nn.Conv1d(4, 8, 3),
            "linear": nn.Linear(4, 8),
        }
    )

    assert standardize_weights(copy.deepcopy(model)) == ["torch", "normed", "line"]
    assert standardize_weights(model, "n*") == ["normed"]

    once = type(model["normed"])
    standardize_weights(model)
    assert type(model["normed"]) is once, "a second time changes nothing"

    with pytest.raises(ValueError, match=r"'\*'"):
        standardize_weights(nn.ModuleDict({"bare": Conv2d(4, 8, 3)}))


def test_filters_of_one_value_are_refused_and_the_model_is_unchanged():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1, groups=8))
    with pytest.raises(ValueError, match="1: "):
        standardize_weights(model)
    assert type(model[0]) is nn.Conv2d


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", COPIES)
def test_copies_and_programs_compute_the_same(way):
    model = nn.Sequential(conv(ConvNormReLU, FrozenBatchNorm2d(8)), nn.ReLU()).eval()
    with torch.no_grad():
        before = model(images())
        standardize_weights(model)
        expected = model(images())
        copied = COPIES[way](model, images())
        y = copied(images())

    assert not torch.allclose(expected, before)
    torch.testing.assert_close(y, expected)
    assert "WeightStandardized" in type(model[0]).__name__
