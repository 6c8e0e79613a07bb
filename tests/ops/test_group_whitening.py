"""GroupWhitening2d against the oracle: values, gradients, input ranks, autocast, memory formats."""

import numpy as np
import pytest
import torch

from . import oracle
from .cases import affine_of, build, correlated, grid
from .oracle import Setting


@pytest.mark.parametrize(("channels", "size", "setting"), grid(), ids=str)
def test_forward_and_backward_equal_the_papers_algorithms(channels, size, setting):
    layer = build(channels, setting)
    weight, bias = affine_of(layer)
    x, grad = correlated((2, channels, *size)), correlated((2, channels, *size), seed=1)
    leaf = torch.from_numpy(x).requires_grad_()
    y = layer(leaf)
    np.testing.assert_allclose(
        y.detach().numpy(), oracle.group_whiten(x, setting, weight, bias), rtol=0, atol=1e-10
    )

    y.backward(torch.from_numpy(grad))
    expected = oracle.group_whiten_backward(x, grad, setting, weight)
    for name, tensor, reference in zip(
        ("x", "weight", "bias"), (leaf, layer.weight, layer.bias), expected, strict=True
    ):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(
            tensor.grad.numpy() / scale, reference / scale, rtol=0, atol=1e-10, err_msg=name
        )


@pytest.mark.parametrize("solver", ["newton", "zca"])
@pytest.mark.parametrize(
    ("channels", "groups", "size"),
    [(80, 8, size) for size in ((), (31,), (1,), (5, 7), (1, 9), (3, 5, 2))]
    + [(13, 64, (9, 11)), (24, 24, (9, 11))],
    ids=str,
)
def test_every_input_rank_and_no_more_groups_than_channels(channels, groups, size, solver):
    layer = build(channels, Setting(groups, eps=1e-3, solver=solver))
    assert layer.num_groups == min(groups, channels)
    x = correlated((3, channels, *size))
    y = layer(torch.from_numpy(x))
    assert y.shape == x.shape
    setting = Setting(layer.num_groups, eps=1e-3, solver=solver)
    np.testing.assert_allclose(
        y.detach().numpy(), oracle.group_whiten(x, setting, *affine_of(layer)), atol=1e-10
    )


@pytest.mark.parametrize("solver", ["newton", "zca"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_does_not_overflow_at_stem_size(dtype, solver):
    """x x^T sums 67200 squares of about 400: 2.7e7, where float16 ends at 65504."""
    setting = Setting(64, solver=solver)
    layer = build(64, setting, torch.float32)
    x = (
        (20 * torch.randn(1, 64, 200, 336, generator=torch.Generator().manual_seed(0)))
        .to(dtype)
        .requires_grad_()
    )
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    expected = oracle.group_whiten(x.detach().double().numpy(), setting, *affine_of(layer))
    error = np.abs(y.detach().double().numpy() - expected) / (1 + np.abs(expected))
    # the output's rounding, half a unit in the last place, times two: the affine map may come before or after it
    assert y.dtype == dtype and error.max() <= 5e-5 + (
        2**-10 if dtype == torch.float16 else 2**-7
    )
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == dtype
    assert all(value.grad.isfinite().all() for value in (x, layer.weight, layer.bias))


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
    x = torch.from_numpy(correlated((2, channels, *size)))
    grad = torch.from_numpy(correlated((2, channels, *size), seed=1))
    results = []
    for fmt in (torch.contiguous_format, memory_format):
        layer = build(channels, Setting(16, eps=1e-3, solver=solver))
        leaf = x.clone(memory_format=fmt).requires_grad_()
        y = layer(leaf)
        assert y.is_contiguous(memory_format=fmt)
        y.backward(grad.to(memory_format=fmt))
        results.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
