"""batch_whiten against its oracle: values, gradients, groups of every size, precision, memory formats."""

import numpy as np
import pytest
import torch

from gw_detectron.layers import SOLVERS, batch_whiten

from . import solver_oracle as oracle
from .cases import assert_close, bw, features


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize(
    ("channels", "width", "size"),
    [(12, 4, (5, 3)), (11, 4, (9,)), (5, 1, ()), (6, 64, (2, 3, 2))],
    ids=str,
)
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_it_equals_its_oracle(solver, channels, width, size, corr):
    x = features(4, channels, *size)
    weight = torch.arange(channels).double() + 1
    bias = -torch.arange(channels).double()

    y = bw(x, width, weight, bias, num_iters=3, eps=1e-3, solver=solver, corr=corr)

    white = oracle.batch_whiten(x.numpy(), width, solver, iters=3, eps=1e-3, corr=corr)
    expected = np.moveaxis(white, 1, -1) * weight.numpy() + bias.numpy()
    assert_close(y, np.moveaxis(expected, -1, 1))


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_gradcheck_of_input_and_affine(solver, corr):
    x = features(3, 5, 2, 2)
    weight = torch.rand(5).double() + 0.5
    bias = torch.rand(5).double()

    def run(x, weight, bias):
        return bw(x, 3, weight, bias, num_iters=3, eps=0.1, solver=solver, corr=corr)

    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str
)
def test_half_precision_input_is_whitened_in_float32(dtype):
    x = features(2, 16, 9, 7).to(dtype)

    y = bw(x, 8)

    assert y.dtype == dtype
    expected = oracle.batch_whiten(x.double().numpy(), 8, "newton", eps=1e-5)
    # half of the last digit of numbers up to 8
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3.2e-2, torch.float32: 1e-4}[
        dtype
    ]
    assert_close(y.double(), expected, tolerance)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_autocast_leaves_statistics_in_float32(solver):
    x = 300 * features(2, 16, 9, 7).float()  # squares overflow float16

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
    x = features(3, channels, *size)
    expected = bw(x, 4)

    y = bw(x.contiguous(memory_format=memory_format), 4)

    assert y.is_contiguous(memory_format=memory_format)
    assert expected.is_contiguous()
    assert_close(y, expected, 1e-12)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"x": torch.zeros(6)}, r"x: .* \(6,\)"),
        ({"x": torch.zeros(2, 6, dtype=torch.int64)}, "torch.int64"),
        ({"channels_per_group": 0}, r"channels_per_group \(0\)"),
        ({"weight": torch.ones(5)}, r"weight: .* \(6,\), got \(5,\)"),
        ({"bias": torch.ones(6, device="meta")}, "bias: on meta, but x is on cpu"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_arguments_are_refused_by_value(arguments, named):
    with pytest.raises(ValueError, match=named):
        batch_whiten(**{"x": torch.zeros(2, 6, 3, 3), **arguments})
