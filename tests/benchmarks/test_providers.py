"""The measured layers: the paper's listing by its numbers, the floor by its operations."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.figure1 import Figure1Whitening
from benchmarks.floor import products, traffic
from benchmarks.providers import MODES, PROVIDERS, Case

from ..ops.cases import correlated
from ..ops.oracle import Setting, group_whiten, group_whiten_backward

CPU = torch.device("cpu")


@pytest.mark.parametrize(("groups", "iters"), [(8, 5), (4, 3), (1, 1)])
def test_figure1_is_the_papers_formula(groups, iters):
    setting = Setting(groups, iters, eps=0.0)
    x, grad_y = correlated((3, 16, 7, 5)), correlated((3, 16, 7, 5), seed=1)
    weight, bias = np.linspace(0.5, 1.5, 16), np.linspace(-1, 1, 16)
    layer = Figure1Whitening(16, groups, iters).double()
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight).reshape(layer.weight.shape))
        layer.bias.copy_(torch.as_tensor(bias).reshape(layer.bias.shape))
    input = torch.tensor(x, requires_grad=True)
    y = layer(input)
    y.backward(torch.tensor(grad_y))
    np.testing.assert_allclose(y.detach(), group_whiten(x, setting, weight, bias), rtol=0, atol=1e-12)
    grads = group_whiten_backward(x, grad_y, setting, weight)
    for found, expected in zip((input.grad, layer.weight.grad, layer.bias.grad), grads, strict=True):
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_floor_does_the_products_it_counts(mode):
    x = torch.randn(2, 12, 5, 7)
    # the layer's two products of depth g per column and 3 small ones per step; 5 and 8 with the backward pass
    big, small = {"forward": (2, 3), "forward+backward": (5, 8)}[mode]
    step = products(x, groups=4, iters=3, mode=mode)
    with FlopCounterMode(display=False) as counter:
        step.run()
    assert counter.get_total_flops() == 2 * 2 * (big * 4**2 * 12 // 4 * 35 + small * 3 * 4**3)


@pytest.mark.parametrize(("mode", "passes"), [("forward", 3), ("forward+backward", 8)])
def test_gpu_floor_moves_the_bytes_of_a_normalization(mode, passes):
    x = torch.randn(2, 4, 3, 5, dtype=torch.bfloat16)
    copied = traffic(x, mode).run()
    moved = 2 * copied.numel() * copied.element_size()  # every copied byte is read and written
    assert moved == passes * x.numel() * x.element_size()


def test_every_layer_runs():
    case = Case((2, 64, 5, 3), "bf16-pure", "forward", CPU, num_groups=8, iters=2)
    x = case.input()
    outputs = {name: case.apply(case.build(name), x) for name in PROVIDERS if name not in ("figure1_compiled", "floor")}
    for name, y in outputs.items():
        assert (y.shape, y.dtype) == (x.shape, torch.bfloat16), name
    assert torch.equal(outputs["ours_relu"], outputs["relu_apart"]) and (outputs["ours_relu"] == 0).any()
    assert (outputs["ours"] < 0).any()


def test_autocast_keeps_parameters_in_float32():
    case = Case((2, 64, 5, 3), "bf16", "forward", CPU, num_groups=8, iters=2)
    conv = case.build("conv3x3")
    assert conv.weight.dtype == torch.float32
    assert case.apply(conv, case.input()).dtype == torch.bfloat16
