"""Norms of mixed statistics beside eigendecomposition in float64, and their gradients."""

import pytest
import torch
from torch import nn

from gw_detectron.layers import MixedBatchNorm2d, MixedWhitening2d, use_backend
from gw_detectron.ops.mixed_matmul import mix_whiten
from gw_detectron.ops.mixed_statistics import (
    Mixture,
    bounded_inverse_sqrt,
    mix_standardize,
    mixed_inverse_sqrt,
)

#: images like BN's data, images of another appearance, and with the largest eigenvalue and mean that an R-18 had
SPREADS = {"near": (1.0, 0.1), "far": (3.0, 2.0), "farthest": (15.0, 47.0)}


def exact_inverse_sqrt(mean, covariance, mixture):
    """Return S^(-1/2) by eigendecomposition in float64."""
    mean = mean.double()
    identity = torch.eye(mean.shape[-1], dtype=torch.float64)
    s = (1 - mixture.a) * identity + mixture.a * covariance.double()
    s = s + mixture.b * (1 - mixture.b) * mean[..., :, None] * mean[..., None, :]
    values, vectors = torch.linalg.eigh(s)
    return vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT


def exact_output(x, layer):
    """Compute a layer's output from its definition in float64, each sample and group by itself."""
    x = x.double()
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean, variance, weight, bias = (
        tensor.detach().double().reshape(shape)
        for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    )
    u = (x - mean) / (variance + layer.eps).sqrt()
    groups = getattr(layer, "num_groups", x.shape[1])
    columns = u.reshape(len(x), groups, -1)
    mu = columns.mean(-1)
    centered = columns - mu[..., None]
    covariance = centered @ centered.mT / columns.shape[-1]
    if isinstance(layer, MixedBatchNorm2d):
        covariance = torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
        s = (1 - layer.alpha) + layer.alpha * covariance.diagonal(dim1=-2, dim2=-1)
        s = s + layer.mean * (1 - layer.mean) * mu**2
        matrix = torch.diag_embed(s.rsqrt())
    else:
        matrix = exact_inverse_sqrt(mu, covariance, Mixture(layer.alpha, layer.mean))
    y = matrix @ (columns - layer.mean * mu[..., None])
    return weight * y.reshape(x.shape) + bias


def statistics(spread, groups=64, samples=4):
    """Return means and covariances of normalized features; two singular directions."""
    generator = torch.Generator().manual_seed(0)
    scale, offset = SPREADS[spread]
    shape = (samples, groups, 4 * groups)
    columns = torch.randn(shape, generator=generator, dtype=torch.float64)
    columns[:, 0] *= scale
    columns[:, 1] = columns[:, 2]
    columns[:, 3] = 0
    direction = torch.randn((samples, groups, 1), generator=generator)
    columns += offset * direction / direction.norm(dim=1, keepdim=True)

    mean = columns.mean(-1)
    centered = columns - mean[..., None]
    return mean, centered @ centered.mT / columns.shape[-1]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_the_solver_is_within_a_percent_of_eigh(spread, share):
    mean, covariance = statistics(spread)
    mixture = Mixture(share, share)
    expected = exact_inverse_sqrt(mean, covariance, mixture)

    matrices = mixed_inverse_sqrt(mean.float(), covariance.float(), mixture, 6)

    errors = (matrices - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    assert errors.max() < 1e-3  # of float32; five steps: 2e-2 at the farthest


@pytest.mark.parametrize("spread", SPREADS)
def test_more_steps_converge_in_float32(spread):
    """The usual iteration, in which products do not commute exactly, diverges here: 1e30 at 12 steps."""
    mean, covariance = statistics(spread)
    mixture = Mixture(0.5, 0.5)
    expected = exact_inverse_sqrt(mean, covariance, mixture)

    for steps in (10, 20, 40):
        matrices = mixed_inverse_sqrt(mean.float(), covariance.float(), mixture, steps)
        assert (matrices - expected).norm() < 1e-4 * expected.norm()


def test_without_the_covariance_the_closed_form_is_exact():
    mean, covariance = statistics("far")

    matrices = mixed_inverse_sqrt(mean, None, Mixture(0, 0.3), 0)

    expected = exact_inverse_sqrt(mean, covariance, Mixture(0, 0.3))
    torch.testing.assert_close(matrices, expected, rtol=0, atol=1e-13)


def test_the_norm_of_the_matrix_is_bounded():
    mean, covariance = statistics("far")
    for share in (0.1, 0.5, 0.9):
        matrices = mixed_inverse_sqrt(mean, covariance, Mixture(share, share), 12)
        largest = torch.linalg.matrix_norm(matrices, 2).max()
        assert largest <= (1 - share) ** -0.5 + 1e-9


@pytest.mark.parametrize("bound", [1.0, 0.5])
def test_no_spread_gives_the_root_of_the_bound(bound):
    matrices = bounded_inverse_sqrt(torch.zeros(2, 8, 8), bound, 6)

    expected = bound**-0.5 * torch.eye(8).expand(2, 8, 8)
    torch.testing.assert_close(matrices, expected, rtol=0, atol=3e-7)
    if bound == 1:
        assert torch.equal(matrices, expected)


LAYERS = {
    "MixGW": lambda **shares: MixedWhitening2d(8, num_groups=4, **shares),
    "MixBN": lambda **shares: MixedBatchNorm2d(8, **shares),
}
SHARES = [(0.3, 0.3), (0.5, 0.2), (0.0, 0.4), (0.4, 0.0), (1.0, 1.0), (0.0, 1.0)]


def trained(make, alpha, mean):
    """Return a layer in float64 with any weights and statistics."""
    layer = make(alpha=alpha, mean=mean).double()
    generator = torch.Generator().manual_seed(1)
    for tensor in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(tensor, generator=generator)
    nn.init.uniform_(layer.running_var, 0.5, 3.0, generator=generator)
    return layer


def images(*shape):
    return (
        2 + 3 * torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    )


@pytest.mark.parametrize("alpha, mean", SHARES)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("spatial", [(5, 7), (30,), (2, 3, 4)])
def test_output_is_that_of_the_definition(make, alpha, mean, spatial):
    layer = trained(make, alpha, mean)
    layer.num_iters = 30
    x = images(3, 8, *spatial)

    torch.testing.assert_close(layer(x), exact_output(x, layer), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_gradients(make, share):
    layer = trained(make, share, share)
    x = images(2, 8, 3, 4).requires_grad_()

    def call(x, weight, bias):
        norm = layer.fixed_norm._replace(weight=weight, bias=bias)
        if isinstance(layer, MixedBatchNorm2d):
            return mix_standardize(x, norm, layer.mixture)
        return mix_whiten(x, norm, layer.mixture, layer.num_groups, layer.num_iters)

    inputs = (x, layer.weight, layer.bias)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize(
    "alpha, mean", [(0.3, 0.3), (0.7, 0.1), (1.0, 1.0), (0.5, 0.0)]
)
# the second has its means subtracted first
@pytest.mark.parametrize("offset", [0, 1e3])
@pytest.mark.parametrize("shape", [(3, 8, 5, 7), (1, 8, 40), (9, 8, 2, 2)])
def test_closed_forms_equal_the_reference(alpha, mean, offset, shape):
    layer = trained(LAYERS["MixGW"], alpha, mean)
    x = images(*shape) + offset
    factors = torch.randn(shape, dtype=x.dtype)
    results = []
    for backend in ("matmul", "reference"):
        inputs = x.clone().requires_grad_()
        with use_backend(backend):
            y = layer(inputs)
            parameters = (inputs, layer.weight, layer.bias)
            gradients = torch.autograd.grad((y * factors).sum(), parameters)
        results.append((y.detach(), *gradients))

    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_second_derivatives_need_no_other_gradients(frozen):
    layer = trained(LAYERS["MixGW"], 0.5, 0.5)
    x = images(2, 8, 3, 4).requires_grad_(frozen != "x")
    if frozen != "x":
        getattr(layer, frozen).requires_grad_(False)
    wanted = layer.weight if frozen == "x" else x
    results = []
    for backend in ("matmul", "reference"):
        with use_backend(backend):
            loss = layer(x).pow(3).sum()
            (gradient,) = torch.autograd.grad(loss, wanted, create_graph=True)
            results.append(torch.autograd.grad(gradient.pow(2).sum(), wanted))

    torch.testing.assert_close(*results)


def test_batched_gradients():
    layer = trained(LAYERS["MixGW"], 0.5, 0.5)
    x = images(1, 8, 2, 2).requires_grad_()

    rows = torch.autograd.functional.jacobian(layer, x, vectorize=True)

    torch.testing.assert_close(rows, torch.autograd.functional.jacobian(layer, x))


def test_gradient_equals_that_of_the_exact_matrix():
    layer = trained(LAYERS["MixGW"], 0.5, 0.5)
    layer.num_iters = 12
    x = images(2, 8, 5, 5).requires_grad_()
    factors = torch.randn(x.shape, dtype=x.dtype)

    (gradient,) = torch.autograd.grad((layer(x) * factors).sum(), x)

    (expected,) = torch.autograd.grad((exact_output(x, layer) * factors).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_shares_of_zero_are_batch_norm_bit_for_bit(make):
    layer = trained(make, 0, 0).float()
    bn = nn.BatchNorm2d(8).eval()
    bn.load_state_dict(layer.state_dict(), strict=False)
    x = images(2, 8, 6, 6).float()

    assert torch.equal(layer(x), bn(x))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(
    "x",
    [
        torch.full((2, 8, 4, 4), 3.0),
        torch.zeros(2, 8, 4, 4),
        torch.randn(2, 8, 1, 1),
        torch.randn(2, 8),
        torch.empty(0, 8, 4, 4),
    ],
    ids=["constant", "zero", "one pixel", "vectors", "empty"],
)
def test_degenerate_images_stay_finite(make, share, x):
    layer = make(alpha=share)
    x = x.clone().requires_grad_()

    y = layer(x)
    y.sum().backward()

    assert y.shape == x.shape
    assert y.isfinite().all()
    for tensor in (x, layer.weight, layer.bias):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_memory_format_and_autocast(make):
    layer = trained(make, 0.5, 0.5).float()
    x = images(2, 8, 6, 6).float()
    expected = layer(x)

    last = layer(x.contiguous(memory_format=torch.channels_last))
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x.bfloat16())

    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)


def test_the_mixture_is_the_covariance_of_both_distributions():
    """Law of total variance: of BN's unit Gaussian and the image, drawn with probabilities 1 - a and a."""
    mean, covariance = statistics("far", groups=8, samples=1)
    a = 0.3
    second_moment = (1 - a) * torch.eye(8) + a * (covariance + mean.mT @ mean)
    total = second_moment - a**2 * mean.mT @ mean

    matrix = mixed_inverse_sqrt(mean, covariance, Mixture(a, a), 20)

    torch.testing.assert_close(
        matrix @ total.double() @ matrix, torch.eye(8).expand(1, 8, 8).double()
    )


def test_vmap():
    layer = trained(LAYERS["MixGW"], 0.3, 0.3)
    x = images(3, 2, 8, 4, 4)
    expected = torch.stack([layer(part) for part in x])

    torch.testing.assert_close(torch.vmap(layer)(x), expected)
