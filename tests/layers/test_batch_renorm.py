"""Batch Renormalization: the paper's Algorithm 1, its schedule, and BN as a special case."""

import numpy as np
import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from gw_detectron.layers import BatchRenorm2d

OPEN = {"warmup": 0, "rmax_at": 1, "dmax_at": 1}  # the schedule ends at the first batch


def batch(seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, 4, 6, dtype=torch.float64, generator=generator) * scale + 2


def layer(batches: int = 10**6, **options) -> BatchRenorm2d:
    """A layer after so many batches, with statistics that are not those of the batch."""
    made = BatchRenorm2d(5, **options).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value, low in (
            (made.weight, 0.5),
            (made.bias, -1),
            (made.running_mean, -1),
            (made.running_var, 0.5),
        ):
            value.copy_(torch.rand(5, dtype=torch.float64, generator=generator) * 4 + low)
        made.num_batches_tracked.fill_(batches)
    return made


def algorithm_1(x, gamma, beta, mu, var, rmax, dmax, momentum, eps=1e-5):
    """Numpy: outputs, and the moving statistics with BN's average of unbiased variances."""
    columns = x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1)
    mu_b, sigma_b = columns.mean(1), np.sqrt(columns.var(1) + eps)
    sigma = np.sqrt(var + eps)
    r = np.minimum(np.maximum(sigma_b / sigma, 1 / rmax), rmax)
    d = np.minimum(np.maximum((mu_b - mu) / sigma, -dmax), dmax)
    shape = (1, -1, 1, 1)
    x_hat = (x - mu_b.reshape(shape)) / sigma_b.reshape(shape) * r.reshape(shape) + d.reshape(
        shape
    )
    y = gamma.reshape(shape) * x_hat + beta.reshape(shape)
    return y, mu + momentum * (mu_b - mu), var + momentum * (columns.var(1, ddof=1) - var), r, d


@pytest.mark.parametrize(("rmax", "dmax"), [(3.0, 5.0), (1.1, 0.2), (1.0, 0.0), (100.0, 100.0)])
def test_algorithm_1(rmax, dmax):
    made, x = layer(rmax=rmax, dmax=dmax, **OPEN), batch()
    state = [
        value.detach().numpy().copy()
        for value in (made.weight, made.bias, made.running_mean, made.running_var)
    ]
    y, mean, var, *_ = algorithm_1(x.numpy(), *state, rmax, dmax, made.momentum)
    torch.testing.assert_close(made(x), torch.from_numpy(y))
    torch.testing.assert_close(made.running_mean, torch.from_numpy(mean))
    torch.testing.assert_close(made.running_var, torch.from_numpy(var))


def test_a_cumulative_average():
    """``update_bn`` recomputes the statistics without a momentum."""
    made, batches = BatchRenorm2d(5).double(), [batch(seed) for seed in range(4)]
    torch.optim.swa_utils.update_bn(batches, nn.Sequential(made))
    torch.testing.assert_close(made.running_mean, torch.cat(batches).mean((0, 2, 3)))


def test_gradients_do_not_pass_through_r_and_d():
    made, x = layer(rmax=2.0, dmax=0.5, **OPEN), batch().requires_grad_()
    state = [
        value.detach().numpy().copy()
        for value in (made.weight, made.bias, made.running_mean, made.running_var)
    ]
    *_, r, d = algorithm_1(x.detach().numpy(), *state, 2.0, 0.5, 0.1)
    r, d = (torch.from_numpy(value).reshape(1, -1, 1, 1) for value in (r, d))
    out = torch.randn(
        3, 5, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    mu = x.mean((0, 2, 3), keepdim=True)
    sigma = ((x - mu).square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    weight, bias = (p.detach().clone().requires_grad_() for p in (made.weight, made.bias))
    y = ((x - mu) / sigma * r + d) * weight.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)
    expected = torch.autograd.grad((y * out).sum(), [x, weight, bias])
    found = torch.autograd.grad((made(x) * out).sum(), [x, made.weight, made.bias])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{"rmax": 1.0, "dmax": 0.0, **OPEN}, {"warmup": 10}])
def test_without_correction_it_is_bn_bit_by_bit(options):
    made = BatchRenorm2d(5, momentum=0.1, **options)
    bn = nn.BatchNorm2d(5)
    for seed in range(3):
        x = batch(seed).float()
        assert torch.equal(made(x), bn(x))
    assert list(made.state_dict()) == list(bn.state_dict())
    assert all(
        torch.equal(value, bn.state_dict()[name]) for name, value in made.state_dict().items()
    )


def test_evaluation_is_bn_and_freezing_makes_frozen_bn():
    made, bn = layer().eval(), nn.BatchNorm2d(5).double().eval()
    bn.load_state_dict(made.state_dict())
    assert torch.equal(made(batch()), bn(batch()))
    frozen = FrozenBatchNorm2d.convert_frozen_batchnorm(layer())
    assert isinstance(frozen, FrozenBatchNorm2d)
    torch.testing.assert_close(frozen(batch()), bn(batch()))


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
    r, d = made._corrections(batch())
    torch.testing.assert_close(
        r, torch.full((5,), rmax, dtype=torch.float64), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        d, torch.full((5,), dmax, dtype=torch.float64), rtol=1e-6, atol=0
    )
    made(batch())
    assert made.num_batches_tracked == batches + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rmax": 0.9}, r"rmax \(0.9\): .* at least 1"),
        ({"warmup": 10, "rmax_at": 10}, r"rmax_at \(10\): .* at least 11"),
        ({"rmax": "3"}, r"rmax \('3'\): expected a number"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_value(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        BatchRenorm2d(**{"num_features": 8, **arguments})


def test_an_empty_batch_changes_nothing_and_has_finite_gradients():
    made = layer(**OPEN)
    before = (made.running_mean.clone(), made.running_var.clone())
    made(batch()[:0].requires_grad_()).sum().backward()
    assert torch.equal(made.running_mean, before[0]) and torch.equal(
        made.running_var, before[1]
    )
    assert not made.weight.grad.any() and not made.bias.grad.any()
