"""Batch Renormalization: the paper's Algorithm 1, its schedule, and BN as a special case."""

import numpy as np
import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from gw_detectron.layers import BatchRenorm2d

from ..ops.cases import assert_close, randn

OPEN = {"warmup": 0, "rmax_at": 1, "dmax_at": 1}  # the schedule ends at the first batch


def batch(seed: int = 0) -> torch.Tensor:
    return randn(3, 5, 4, 6, seed=seed, dtype=torch.float64) * 3 + 2


def layer(batches: int = 10**6, **options) -> BatchRenorm2d:
    """A layer after so many batches, with statistics that are not those of the batch."""
    made = BatchRenorm2d(5, **options).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        made.weight.uniform_(0.5, 4.5, generator=generator)
        made.bias.uniform_(-1, 3, generator=generator)
    made.running_mean.uniform_(-1, 3, generator=generator)
    made.running_var.uniform_(0.5, 4.5, generator=generator)
    made.num_batches_tracked.fill_(batches)
    return made


def column(values) -> torch.Tensor:
    return torch.as_tensor(values).reshape(-1, 1, 1)


def algorithm_1(x, made, rmax, dmax, eps=1e-5):
    """Numpy: outputs, and the moving statistics with BN's average of unbiased variances."""
    tensors = made.weight, made.bias, made.running_mean, made.running_var
    gamma, beta, mu, var = (tensor.detach().numpy().copy() for tensor in tensors)
    columns = x.transpose(0, 2, 3, 1).reshape(-1, x.shape[1])

    mu_b = columns.mean(0)
    sigma_b = np.sqrt(columns.var(0) + eps)
    sigma = np.sqrt(var + eps)
    r = np.clip(sigma_b / sigma, 1 / rmax, rmax)
    d = np.clip((mu_b - mu) / sigma, -dmax, dmax)

    x_hat = (columns - mu_b) / sigma_b * r + d
    y = (gamma * x_hat + beta).reshape(x.transpose(0, 2, 3, 1).shape)
    mean = mu + made.momentum * (mu_b - mu)
    variance = var + made.momentum * (columns.var(0, ddof=1) - var)
    return y.transpose(0, 3, 1, 2), mean, variance, r, d


@pytest.mark.parametrize(
    ("rmax", "dmax"), [(3.0, 5.0), (1.1, 0.2), (1.0, 0.0), (100.0, 100.0)]
)
def test_algorithm_1(rmax, dmax):
    made = layer(rmax=rmax, dmax=dmax, **OPEN)
    x = batch()
    expected = algorithm_1(x.numpy(), made, rmax, dmax)

    y = made(x)

    # the schedule is float32
    for value, wanted in zip(
        (y, made.running_mean, made.running_var), expected, strict=False
    ):
        assert_close(value, wanted, 1e-6)


def test_a_cumulative_average():
    """``update_bn`` recomputes the statistics without a momentum."""
    made = BatchRenorm2d(5).double()
    batches = [batch(seed) for seed in range(4)]

    torch.optim.swa_utils.update_bn(batches, nn.Sequential(made))

    assert_close(made.running_mean, torch.cat(batches).mean((0, 2, 3)))


def test_gradients_do_not_pass_through_r_and_d():
    made = layer(rmax=2.0, dmax=0.5, **OPEN)
    x = batch().requires_grad_()
    dy = batch(3)
    inputs = x, made.weight, made.bias
    *_, r, d = algorithm_1(x.detach().numpy(), made, 2.0, 0.5)

    found = torch.autograd.grad(made(x), inputs, dy)

    variance, mu = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    x_hat = (x - mu) / (variance + 1e-5).sqrt() * column(r) + column(d)
    y = x_hat * column(made.weight) + column(made.bias)
    torch.testing.assert_close(found, torch.autograd.grad(y, inputs, dy))


@pytest.mark.parametrize(
    "options", [{"rmax": 1.0, "dmax": 0.0, **OPEN}, {"warmup": 10}]
)
def test_without_correction_it_is_bn_bit_by_bit(options):
    made = BatchRenorm2d(5, momentum=0.1, **options)
    bn = nn.BatchNorm2d(5)

    for seed in range(3):
        x = batch(seed).float()
        assert torch.equal(made(x), bn(x))

    state, expected = made.state_dict(), bn.state_dict()
    assert list(state) == list(expected)
    assert all(map(torch.equal, state.values(), expected.values()))


def test_evaluation_is_bn_and_freezing_makes_frozen_bn():
    made = layer().eval()
    bn = nn.BatchNorm2d(5).double().eval()
    bn.load_state_dict(made.state_dict())
    expected = bn(batch())

    frozen = FrozenBatchNorm2d.convert_frozen_batchnorm(layer())

    assert torch.equal(made(batch()), expected)
    assert isinstance(frozen, FrozenBatchNorm2d)
    torch.testing.assert_close(frozen(batch()), expected)


@pytest.mark.parametrize(
    ("batches", "rmax", "dmax"),
    [
        (0, 1, 0),
        (5000, 1, 0),
        (15000, 1 + 2 * 10 / 35, 2.5),
        (25000, 1 + 2 * 20 / 35, 5),
        (40000, 3, 5),
        (10**6, 3, 5),
    ],
)
def test_the_papers_schedule(batches, rmax, dmax):
    """BN for 5000 steps, r_max = 3 at 40k, d_max = 5 at 25k."""
    made = layer(batches)
    made.running_var.fill_(1e-4)
    made.running_mean.fill_(-1e6)
    nn.init.ones_(made.weight)
    nn.init.zeros_(made.bias)
    x = batch()
    bn = nn.functional.batch_norm(x, None, None, training=True)

    y = made(x)

    assert_close(y, bn * rmax + dmax, 1e-5)
    assert made.num_batches_tracked == batches + 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rmax": 0.9}, r"rmax \(0.9\): .* 1"),
        ({"warmup": 10, "rmax_at": 10}, r"rmax_at \(10\): .* 11"),
        ({"rmax": "3"}, r"rmax \('3'\)"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_value(arguments, named):
    with pytest.raises((ValueError, TypeError), match=named):
        BatchRenorm2d(**{"num_features": 8, **arguments})


def test_an_empty_batch_changes_nothing_and_has_finite_gradients():
    made = layer(**OPEN)
    mean = made.running_mean.clone()
    variance = made.running_var.clone()

    made(batch()[:0].requires_grad_()).sum().backward()

    assert torch.equal(made.running_mean, mean)
    assert torch.equal(made.running_var, variance)
    assert not made.weight.grad.any()
    assert not made.bias.grad.any()
