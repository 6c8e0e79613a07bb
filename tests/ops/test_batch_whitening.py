"""batch_whiten against its oracle: values, gradients, groups of every size, precision, memory formats."""

import numpy as np
import pytest
import torch

from gw_detectron.layers import SOLVERS, batch_whiten

from . import solver_oracle as oracle
from .cases import bw, correlated
from .test_solver_family import EXACT

#: spatial sizes of a feature map, of pooled features, of sequences and of volumes
SIZES = [(5, 3), (), (9,), (2, 3, 2)]


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(correlated(shape, seed))


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize(("channels", "width"), [(12, 4), (11, 4), (5, 1), (6, 64)], ids=str)
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_it_equals_its_oracle(solver, channels, width, corr):
    x = correlated((4, channels, 5, 3))
    expected = oracle.batch_whiten(x, width, solver, iters=3, eps=1e-3, corr=corr)
    y = bw(torch.from_numpy(x), width, num_iters=3, eps=1e-3, solver=solver, corr=corr)
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_input_rank(size):
    x = correlated((30, 7, *size))
    expected = oracle.batch_whiten(x, 3, "zca", eps=1e-3)
    y = bw(torch.from_numpy(x), 3, eps=1e-3, solver="zca")
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-10)


def test_scale_and_shift_are_of_the_channels():
    x, weight, bias = tensor(3, 7, 5, 3), torch.arange(7.0) + 1, -torch.arange(7.0)
    expected = oracle.batch_whiten(x.numpy(), 3, "newton", eps=1e-3)
    expected = expected * weight.numpy()[:, None, None] + bias.numpy()[:, None, None]
    y = bw(x, 3, eps=1e-3, weight=weight.double(), bias=bias.double())
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-10)
    only_scaled = bw(x, 3, eps=1e-3, weight=weight.double())
    torch.testing.assert_close(only_scaled, y - bias[:, None, None], rtol=0, atol=1e-12)


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize("solver", sorted({*EXACT} - {"zca_entropy"}))  # which raises eigenvalues unless all are equal
def test_output_is_white_in_every_group(solver, corr):
    y = bw(tensor(8, 10, 9, 7), 4, eps=0.0, solver=solver, corr=corr).movedim(1, 0).flatten(1)
    covariance = y @ y.mT / y.shape[1]
    for first in (0, 4, 8):
        group = covariance[first : first + 4, first : first + 4]
        torch.testing.assert_close(group, torch.eye(len(group), dtype=group.dtype), rtol=0, atol=1e-8)
    assert y.mean(1).abs().max() < 1e-12


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_gradcheck_of_input_and_affine(solver, corr):
    x, weight, bias = tensor(3, 5, 2, 2).requires_grad_(), torch.rand(5).double() + 0.5, torch.rand(5).double()

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
    ("size", "memory_format"), [((5, 3), torch.channels_last), ((2, 3, 2), torch.channels_last_3d)], ids=str
)
@pytest.mark.parametrize("channels", [8, 7])
def test_memory_format_is_kept(size, memory_format, channels):
    x = tensor(3, channels, *size)
    y = bw(x.contiguous(memory_format=memory_format), 4)
    assert y.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(y, bw(x, 4), rtol=0, atol=1e-12)
    assert bw(x, 4).is_contiguous()


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_degenerate_batches_give_finite_values_and_gradients(dtype, solver):
    inputs = {
        "constant": torch.full((3, 6, 2, 2), 7.0),
        "one column": tensor(1, 6, 1, 1),
        "fewer columns than channels": tensor(2, 6, 2, 1),
        "equal channels": tensor(3, 1, 5, 3).expand(3, 6, 5, 3),
        "tiny": 1e-12 * tensor(3, 6, 5, 3),
        "huge": 1e12 * tensor(3, 6, 5, 3),
        "dead channels": tensor(3, 6, 5, 3) * torch.tensor([1.0, 0, 0, 1, 0, 1])[:, None, None],
    }
    for name, x in inputs.items():
        x = x.to(dtype).clone().requires_grad_()
        y = bw(x, 6, solver=solver)
        assert y.isfinite().all(), name
        columns = x.numel() // 6
        assert y.abs().max() <= 1.01 * columns**0.5 + 1e-5, f"{name}: a whitened value is at most sqrt(m)"
        if name in ("constant", "one column"):
            assert not y.any()
        y.backward(tensor(*x.shape, seed=1).to(dtype))
        assert x.grad.isfinite().all(), name


@pytest.mark.parametrize("shape", [(0, 6, 5, 3), (2, 6, 0, 3), (0, 6)], ids=str)
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_empty_input_keeps_the_parameters_in_the_graph(shape, solver):
    x = torch.empty(shape, requires_grad=True)
    weight, bias = torch.ones(6, requires_grad=True), torch.zeros(6, requires_grad=True)
    y = bw(x, 4, solver=solver, weight=weight, bias=bias)
    assert y.shape == shape
    y.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6)) and torch.equal(bias.grad, torch.zeros(6))
    assert x.grad.shape == shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(6)}, r"\(N, C, \*spatial\), got \(6,\)"),
        ({"x": torch.zeros(2, 6, dtype=torch.int64)}, "torch.int64"),
        ({"channels_per_group": 0}, r"channels_per_group \(0\): expected an integer of at least 1"),
        ({"weight": torch.ones(5)}, r"weight: expected shape \(6,\), got \(5,\)"),
        ({"bias": torch.ones(6, device="meta")}, r"bias: on meta, but x is on cpu. Fix: move one"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_arguments_are_refused_by_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_whiten(**{"x": torch.zeros(2, 6, 3, 3), **arguments})
