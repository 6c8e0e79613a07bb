"""Bytes saved for backward, against counts by hand."""

import gc
import weakref

import torch
from torch import nn

from benchmarks.memory import peak_bytes, saved_bytes

N, C, H, W = 2, 64, 5, 7
ELEMENTS = N * C * H * W


def saved(module: nn.Module, x: torch.Tensor) -> int:
    return saved_bytes(lambda: module(x), module)


def test_group_norm_saves_its_input_mean_and_deviation():
    x = torch.randn(N, C, H, W, requires_grad=True)
    assert saved(nn.GroupNorm(32, C), x) == 4 * (ELEMENTS + 2 * N * 32)


def test_a_storage_counts_once_and_in_whole():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            square = x * x
            ctx.save_for_backward(x, x.mT, square[0], torch.ones(1).expand(1000))
            return square.clone()

    class Layer(nn.Module):
        def forward(self, x):
            return Product.apply(x)

    x = torch.randn(8, 6, requires_grad=True)
    assert saved(Layer(), x) == 4 * (2 * 8 * 6 + 1)


def test_parameters_and_buffers_do_not_count():
    x = torch.randn(4, 8, requires_grad=True)
    assert saved(nn.Linear(8, 8), x) == 4 * x.numel()  # its weight is saved too
    x = torch.randn(N, C, H, W, requires_grad=True)
    assert saved(nn.BatchNorm2d(C).eval(), x) == 4 * ELEMENTS  # its running statistics too


def test_nothing_is_saved_without_gradient():
    with torch.no_grad():
        assert saved(nn.GroupNorm(32, C), torch.randn(N, C, H, W)) == 0


def test_nothing_stays_alive():
    layer, released = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), []

    def forward():
        result = layer(torch.randn(2, 4, 3, 3))
        weakref.finalize(result, released.append, True)
        return result

    assert saved_bytes(forward, layer)
    gc.collect()
    assert released, "the graph of the forward pass is gone"


def test_no_peak_on_a_cpu():
    assert peak_bytes(lambda: None, torch.device("cpu")) is None
