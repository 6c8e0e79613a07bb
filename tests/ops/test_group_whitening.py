"""GroupWhitening2d against the oracle: values, gradients, input ranks, autocast, memory formats."""

import numpy as np
import pytest
import torch

from . import oracle
from .cases import (
    affine_of,
    assert_close,
    build,
    correlated,
    features,
    gradients,
    grid,
    randn,
)
from .oracle import Setting


@pytest.mark.parametrize(("channels", "size", "setting"), grid(), ids=str)
def test_forward_and_backward_equal_the_papers_algorithms(channels, size, setting):
    layer = build(channels, setting)
    weight, bias = affine_of(layer)
    x = correlated((2, channels, *size))
    grad = correlated((2, channels, *size), seed=1)
    leaf = torch.from_numpy(x).requires_grad_()

    y = layer(leaf)
    y.backward(torch.from_numpy(grad))

    assert_close(y, oracle.group_whiten(x, setting, weight, bias))
    expected = oracle.group_whiten_backward(x, grad, setting, weight)
    for tensor, wanted in zip((leaf, layer.weight, layer.bias), expected, strict=True):
        scale = np.abs(wanted).max()
        assert_close(tensor.grad / scale, wanted / scale)


@pytest.mark.parametrize("solver", ["newton", "zca"])
@pytest.mark.parametrize(
    ("channels", "groups", "size"),
    [(80, 8, size) for size in ((), (31,), (1,), (5, 7), (1, 9), (3, 5, 2))]
    + [(13, 64, (9, 11)), (24, 24, (9, 11))],
    ids=str,
)
def test_every_input_rank_and_no_more_groups_than_channels(
    channels, groups, size, solver
):
    layer = build(channels, Setting(groups, eps=1e-3, solver=solver))
    x = features(3, channels, *size)

    y = layer(x)

    assert layer.num_groups == min(groups, channels)
    setting = Setting(layer.num_groups, eps=1e-3, solver=solver)
    assert_close(y, oracle.group_whiten(x.numpy(), setting, *affine_of(layer)))


@pytest.mark.parametrize("solver", ["newton", "zca"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_overflow_at_stem_size(dtype, solver):
    """x x^T sums 67200 squares of about 400: 2.7e7, where float16 ends at 65504."""
    setting = Setting(64, solver=solver)
    layer = build(64, setting, torch.float32)
    x = (20 * randn(1, 64, 200, 336)).to(dtype).requires_grad_()

    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    y.backward(torch.ones_like(y))

    assert y.dtype == x.grad.dtype == dtype
    expected = oracle.group_whiten(
        x.detach().double().numpy(), setting, *affine_of(layer)
    )
    difference = np.abs(y.detach().double().numpy() - expected)
    # the output's rounding, half a unit in the last place, times two: the affine map may come
    # before or after it
    rounding = 2**-10 if dtype == torch.float16 else 2**-7
    assert (difference <= (5e-5 + rounding) * (1 + np.abs(expected))).all()
    for tensor in (x, layer.weight, layer.bias):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("solver", ["newton", "zca"])
@pytest.mark.parametrize("channels", [16, 64])
@pytest.mark.parametrize(
    ("size", "memory_format"),
    [
        ((5, 7), torch.channels_last),
        ((3, 4, 5), torch.channels_last_3d),
        ((5, 7), torch.contiguous_format),
    ],
    ids=str,
)
def test_memory_format_is_kept(size, memory_format, channels, solver):
    layer = build(channels, Setting(16, eps=1e-3, solver=solver))
    x = features(2, channels, *size)
    grad = features(2, channels, *size, seed=1)
    expected = gradients(layer, x, grad)

    found = gradients(
        layer,
        x.contiguous(memory_format=memory_format),
        grad.contiguous(memory_format=memory_format),
    )

    assert found[0].is_contiguous(memory_format=memory_format)
    for value, wanted in zip(found, expected, strict=True):
        assert_close(value, wanted, 1e-12)
