"""FRN and EvoNorm-S0 against the formulas of their papers, and in our components and stock ones."""

import sys

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F
from detectron2.layers import Conv2d, get_norm
from torch import nn

import gw_detectron.norms
from gw_detectron import convert_norms, norm_spec, resolve_norm
from gw_detectron.errors import NormError
from gw_detectron.modeling import ConvNormReLU
from gw_detectron.modeling.resnet import GWBottleneckBlock
from gw_detectron.norms import norm_rows

needs_timm = pytest.mark.usefixtures("timm")
NAMES = ("FRN", "EvoNormS0:groups=4")


@pytest.fixture
def timm():
    pytest.importorskip("timm")


def filled(spec: str, channels: int = 8, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A layer with random parameters."""
    layer = get_norm(resolve_norm(spec), channels).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(channels, generator=generator, dtype=torch.float64))
    return layer


def images(dtype: torch.dtype = torch.float64, channels: int = 8) -> torch.Tensor:
    return torch.randn(2, channels, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype) * 2


def oracle(layer: nn.Module, x: torch.Tensor, relu: bool) -> torch.Tensor:
    """The papers' formulas in numpy."""
    x = x.detach().double().numpy()
    p = {name: value.detach().double().numpy().reshape(1, -1, 1, 1) for name, value in layer.named_parameters()}
    if layer.norm_name == "FRN":
        nu2 = (x**2).mean((2, 3), keepdims=True)
        y = p["weight"] * x / np.sqrt(nu2 + 1e-6) + p["bias"]
        return torch.from_numpy(np.maximum(y, p["tau"]) if relu else y)
    if not relu:
        return torch.from_numpy(p["weight"] * x + p["bias"])
    groups = x.reshape(len(x), 4, -1)
    std = np.sqrt(groups.var(2) + 1e-5).repeat(x.shape[1] // 4, 1)[:, :, None, None]
    return torch.from_numpy(p["weight"] * x * scipy.special.expit(p["v"] * x) / std + p["bias"])


@needs_timm
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_formula(name, relu):
    """timm computes statistics in float32 also for float64."""
    layer = filled(name)
    torch.testing.assert_close(layer(images(), relu=relu), oracle(layer, images(), relu), rtol=1e-6, atol=1e-6)


@needs_timm
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_large_values_of_half_precision(name, dtype, relu):
    """Their squares overflow float16, statistics are in float32."""
    layer, x = filled(name, dtype=torch.float32), (images() * 300).to(dtype)
    y = layer(x, relu=relu)
    assert y.dtype == dtype
    expected = oracle(layer, x, relu)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]  # of the output's rounding
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@needs_timm
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient_also_without_activation(name):
    """DistributedDataParallel waits for each."""
    layer = filled(name)
    activation = "tau" if name == "FRN" else "v"
    for relu in (False, True):
        gradients = torch.autograd.grad(layer(images(), relu=relu).square().sum(), list(layer.parameters()))
        by_name = dict(zip([n for n, _ in layer.named_parameters()], gradients, strict=True))
        assert all(bool(gradient.any()) == (relu or name != activation) for name, gradient in by_name.items())
    assert layer(images()[:0]).shape == (0, 8, 5, 6)


@needs_timm
@pytest.mark.parametrize("name", NAMES)
def test_its_activation_replaces_a_fused_relu_and_no_other(name):
    layer, x = filled(name), images()
    conv = ConvNormReLU(8, 8, 1, bias=False, norm=layer, activation=nn.ReLU()).double()
    stock = Conv2d(8, 8, 1, bias=False, norm=layer, activation=nn.ReLU()).double()
    stock.weight = conv.weight
    features = F.conv2d(x, conv.weight)
    torch.testing.assert_close(conv(x), oracle(layer, features, True), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stock(x), oracle(layer, features, False).relu(), rtol=1e-5, atol=1e-5)


@needs_timm
@pytest.mark.parametrize("name", NAMES)
def test_in_a_block_the_third_norm_has_no_activation(name):
    block = GWBottleneckBlock(8, 16, bottleneck_channels=8, norm=resolve_norm(name))
    called = {}
    for place in ("conv1", "conv2", "conv3", "shortcut"):

        def note(module, args, kwargs, place=place):
            called[place] = kwargs.get("relu", False)

        getattr(block, place).norm.register_forward_pre_hook(note, with_kwargs=True)
    block(images(torch.float32)).sum().backward()
    assert called == {"conv1": True, "conv2": True, "conv3": False, "shortcut": False}
    assert all(parameter.grad is not None for parameter in block.parameters())


@needs_timm
def test_names_and_options():
    assert norm_spec(resolve_norm("FRN")(64)) == "FRN:eps=1e-06"
    assert norm_spec(resolve_norm("EvoNormS0")(64)) == "EvoNormS0:groups=32,eps=1e-05"
    assert norm_spec(resolve_norm("FRN:eps=0.01")(64)) == "FRN:eps=0.01"
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    convert_norms(model, {"*": "FRN"})
    (row,) = norm_rows(model)
    assert (row.spec, row.channels, row.parameters) == ("FRN:eps=1e-06", 8, 24)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 8, 6, 6)


@needs_timm
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("EvoNormS0:groups=0", r"num_groups \(0\)"),
        ("EvoNormS0", r"num_groups \(32\): does not divide 48 channels"),
        ("FRN:eps=-1", r"eps \(-1.0\)"),
        ("FRN:groups=2", "FRN has no option 'groups'"),
    ],
)
def test_wrong_options(spec, message):
    with pytest.raises(NormError, match=message):
        resolve_norm(spec, channels=[48])


@pytest.mark.parametrize("name", ["FRN", "EvoNormS0"])
def test_without_timm_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.layers.evo_norm", None)
    monkeypatch.delitem(sys.modules, "gw_detectron.norms.timm_norms", raising=False)
    monkeypatch.delattr(gw_detectron.norms, "timm_norms", raising=False)
    with pytest.raises(NormError, match=rf"MODEL.FPN.NORM \('{name}'\): timm cannot be imported.*pip install timm"):
        resolve_norm(name, where="MODEL.FPN.NORM")
