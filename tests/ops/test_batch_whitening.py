"""batch_whiten against its oracle: values, gradients, groups of every size, precision, memory formats."""

import numpy as np
import pytest
import torch

from gw_detectron.layers import SOLVERS, batch_whiten

from . import solver_oracle as oracle
from .cases import bw, correlated


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(correlated(shape, seed))


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize(
    ("channels", "width", "size"),
    [(12, 4, (5, 3)), (11, 4, (9,)), (5, 1, ()), (6, 64, (2, 3, 2))],
    ids=str,
)
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_it_equals_its_oracle(solver, channels, width, size, corr):
    x, weight, bias = (
        correlated((4, channels, *size)),
        np.arange(channels) + 1.0,
        -np.arange(float(channels)),
    )
    expected = oracle.batch_whiten(x, width, solver, iters=3, eps=1e-3, corr=corr)
    expected = np.moveaxis(np.moveaxis(expected, 1, -1) * weight + bias, -1, 1)
    affine = torch.from_numpy(weight), torch.from_numpy(bias)
    y = bw(torch.from_numpy(x), width, *affine, num_iters=3, eps=1e-3, solver=solver, corr=corr)
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_gradcheck_of_input_and_affine(solver, corr):
    x, weight, bias = (
        tensor(3, 5, 2, 2).requires_grad_(),
        torch.rand(5).double() + 0.5,
        torch.rand(5).double(),
    )

    def run(x, weight, bias):
        return bw(x, 3, weight, bias, num_iters=3, eps=0.1, solver=solver, corr=corr)

    assert torch.autograd.gradcheck(run, (x, weight.requires_grad_(), bias.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_precision_input_is_whitened_in_float32(dtype):
    x = tensor(2, 16, 9, 7).to(dtype)
    y = bw(x, 8)
    assert y.dtype == dtype
    expected = oracle.batch_whiten(x.double().numpy(), 8, "newton", eps=1e-5)
    # half of the last digit of numbers up to 8
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3.2e-2, torch.float32: 1e-4}[dtype]
    np.testing.assert_allclose(y.double().numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_autocast_leaves_statistics_in_float32(solver):
    x = 300 * tensor(2, 16, 9, 7).float()  # squares overflow float16
    with torch.autocast("cpu", torch.bfloat16):
        inside = bw(x, 8, solver=solver)
    assert torch.equal(inside, bw(x, 8, solver=solver))


@pytest.mark.parametrize(
    ("size", "memory_format"),
    [((5, 3), torch.channels_last), ((2, 3, 2), torch.channels_last_3d)],
    ids=str,
)
@pytest.mark.parametrize("channels", [8, 7])
def test_memory_format_is_kept(size, memory_format, channels):
    x = tensor(3, channels, *size)
    y = bw(x.contiguous(memory_format=memory_format), 4)
    assert y.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(y, bw(x, 4), rtol=0, atol=1e-12)
    assert bw(x, 4).is_contiguous()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(6)}, r"\(N, C, \*spatial\), got \(6,\)"),
        ({"x": torch.zeros(2, 6, dtype=torch.int64)}, "torch.int64"),
        (
            {"channels_per_group": 0},
            r"channels_per_group \(0\): expected an integer of at least 1",
        ),
        ({"weight": torch.ones(5)}, r"weight: expected shape \(6,\), got \(5,\)"),
        (
            {"bias": torch.ones(6, device="meta")},
            r"bias: on meta, but x is on cpu. Fix: move one",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_arguments_are_refused_by_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_whiten(**{"x": torch.zeros(2, 6, 3, 3), **arguments})
