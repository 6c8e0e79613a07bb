"""Samples without variance, or with fewer columns than groups: finite values and gradients, never NaN."""

import itertools
import math

import numpy as np
import pytest
import torch

from gw_detectron.errors import NonFiniteError
from gw_detectron.layers import SOLVERS, BatchWhitening2d, GroupWhitening2d

from . import oracle
from .cases import (
    affine_of,
    assert_close,
    build,
    correlated,
    error,
    features,
    gw,
    randn,
)
from .oracle import Setting

PUBLISHED = ["newton", "zca"]
EPS = [1e-5, 0.0]
DTYPES = [torch.float32, torch.float64]


def _dead(alive: slice, scale: float = 1.0) -> np.ndarray:
    x = np.maximum(scale * correlated((2, 32, 5, 3)), 0)
    keep = np.zeros(32, bool)
    keep[alive] = True
    return x * keep[:, None, None]


def _one_bright_pixel() -> np.ndarray:
    x = np.zeros((2, 32, 5, 3))
    x[:, 7, 2, 1] = 100.0
    return x


#: name -> (groups, x); every x of CENTERED_ZERO is exactly its group means
CENTERED_ZERO = {
    "zero": (16, np.zeros((2, 32, 5, 3))),
    "constant": (16, np.full((2, 32, 5, 3), 3.0)),
    "constant per group": (
        16,
        np.repeat(np.arange(16.0), 2)[None, :, None, None] * np.ones((2, 1, 5, 3)),
    ),
    "single pixel": (32, correlated((2, 32, 1, 1))),
    "vector": (32, correlated((2, 32))),
}
DEGENERATE = CENTERED_ZERO | {
    "half of the channels dead": (16, _dead(slice(0, 16))),
    "one channel alive": (16, _dead(slice(5, 6))),
    "one channel dead": (32, _dead(slice(1, None))),
    "large with dead channels": (16, _dead(slice(0, 10), 1e3)),
    "one bright pixel": (16, _one_bright_pixel()),
    "two columns": (32, correlated((2, 32, 2, 1))),
    "fewer columns than groups": (32, correlated((2, 32, 5, 3))),
    "equal channels": (16, np.repeat(correlated((2, 1, 5, 3)), 32, axis=1)),
    "constant up to rounding": (
        16,
        np.full((2, 32, 5, 3), 0.1) * (1 + 1e-7 * correlated((2, 32, 5, 3))),
    ),
    "tiny": (16, 1e-9 * correlated((2, 32, 5, 3))),
    "very tiny": (16, 1e-14 * correlated((2, 32, 5, 3))),
    "next to nothing": (16, 1e-25 * correlated((2, 32, 5, 3))),
    "huge": (16, 1e12 * correlated((2, 32, 5, 3))),
    "one sample zero": (
        16,
        np.stack([np.zeros((32, 5, 3)), correlated((1, 32, 5, 3))[0]]),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_output_is_bounded_and_gradients_are_finite(solver, corr, dtype):
    """No whitening matrix psi(Sigma) <= Sigma^(-1/2) makes |y| larger than sqrt(M)."""
    for (name, (groups, array)), eps in itertools.product(DEGENERATE.items(), EPS):
        layer = GroupWhitening2d(32, groups, eps=eps, solver=solver, corr=corr).to(
            dtype
        )
        x = torch.from_numpy(array).to(dtype).requires_grad_()

        y = layer(x)
        y.backward(features(*x.shape, seed=3).to(dtype))

        columns = x[0].numel() / groups
        assert y.isfinite().all(), (name, eps)
        assert y.abs().max() <= math.sqrt(columns) * 1.01 + 1e-5, (name, eps)
        for tensor in (x, layer.weight, layer.bias):
            assert tensor.grad.isfinite().all(), (name, eps)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_sample_without_variance_gives_the_bias(solver, dtype):
    for (name, (groups, array)), eps in itertools.product(CENTERED_ZERO.items(), EPS):
        layer = build(32, Setting(groups, eps=eps, solver=solver), dtype)
        x = torch.from_numpy(array).to(dtype)

        y = layer(x)

        spatial = [1] * (x.dim() - 2)
        bias = layer.bias.view(-1, *spatial).expand_as(x)
        assert torch.equal(y, bias), (name, eps)


@pytest.mark.parametrize("solver", PUBLISHED)
@pytest.mark.parametrize(
    "name", [n for n in DEGENERATE if n not in ("tiny", "very tiny", "next to nothing")]
)
def test_with_eps_degenerate_samples_still_follow_the_formula(name, solver):
    groups, x = DEGENERATE[name]
    setting = Setting(groups, eps=1e-3, solver=solver)
    layer = build(32, setting)

    y = layer(torch.from_numpy(x))

    assert_close(y, oracle.group_whiten(x, setting, *affine_of(layer)), 1e-8)


# pca has no derivative at equal eigenvalues
@pytest.mark.parametrize("solver", sorted(set(SOLVERS) - {"pca"}))
@pytest.mark.parametrize("scale", [30.0, 1e3])
def test_gradients_do_not_explode_with_equal_channels(solver, scale):
    """Half of the eigenvalues are zero up to rounding, and eps is below that; they must count as zero."""
    for seed in range(20):
        half = scale * randn(1, 32, 16, 16, seed=seed)
        x = half.repeat_interleave(2, 1).requires_grad_()

        y = gw(x, 64, solver=solver)
        y.backward(randn(*x.shape, seed=100 + seed))

        assert x.grad.abs().max() * scale < 100


def ill_conditioned(largest: float) -> torch.Tensor:
    """Return (2, 64, 16, 16) whose covariance has eigenvalues from ``largest`` to 1e-6 of it."""
    noise = np.random.default_rng(0).normal(size=(2, 64, 256))
    centered = noise - noise.mean(-1, keepdims=True)
    u, _, v = np.linalg.svd(centered, full_matrices=False)
    std = np.geomspace(largest, 1e-6 * largest, 64) ** 0.5
    x = 16 * (u * std) @ v
    return torch.from_numpy(x).unflatten(2, (16, 16))


def gram(y: torch.Tensor) -> torch.Tensor:
    """Return y^T y, which does not depend on the axes that a solver chooses."""
    return y.flatten(2).mT @ y.flatten(2)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@pytest.mark.parametrize("largest", [1.0, 10.0, 100.0])
def test_eps_regularizes_float32_before_directions_are_cut(solver, largest):
    """Up to a sixth of the eigenvalues are below g 2^-23 lambda_max; eps = 1e-5 makes the sum regular."""
    results = []
    for dtype in (torch.float64, torch.float32):
        x = ill_conditioned(largest).to(dtype).requires_grad_()
        y = gw(x, 64, eps=1e-5, solver=solver)
        y.backward(randn(*x.shape, dtype=torch.float64).to(dtype))
        if solver in ("pca", "pivoted_cholesky"):
            y = gram(y)
        results.append((y, x.grad))

    (expected, expected_grad), (y, grad) = results
    assert error(y, expected) < 0.05
    assert grad.isfinite().all()
    # which has no derivative at eigenvalues that are equal up to rounding
    if solver != "pca":
        assert error(grad, expected_grad) < 0.1


@pytest.mark.parametrize("solver", ["newton", "cholesky", "pivoted_cholesky"])
def test_nan_stays_in_its_sample_without_eigendecomposition(solver):
    x = features(3, 32, 5, 3)
    clean = gw(x, 16, solver=solver, relu=True)
    x[1, 4, 2, 2] = math.nan

    y = gw(x, 16, solver=solver, relu=True)  # which hides no NaN

    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert y[1].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("groups", [1, 2, 16, 64])
@pytest.mark.parametrize("solver", ["zca", "zca_max", "zca_entropy", "pca"])
def test_eigendecomposition_refuses_values_that_are_not_finite(solver, groups, bad):
    x = features(3, 64, 5, 3)
    x[1, 4, 2, 2] = bad

    with pytest.raises(NonFiniteError, match=f"solver={solver}"):
        gw(x, groups, solver=solver)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16], ids=str
)
def test_empty_input_keeps_the_parameters_in_the_graph(dtype, solver):
    shapes = ((0, 32, 5, 3), (2, 32, 0, 3), (0, 32), (2, 32, 0), (0, 32, 2, 3, 4))
    for shape, kind in itertools.product(shapes, (GroupWhitening2d, BatchWhitening2d)):
        layer = kind(32, 16 if kind is GroupWhitening2d else 12, solver=solver)
        x = torch.empty(shape, dtype=dtype, requires_grad=True)

        y = layer(x)
        y.sum().backward()

        assert y.shape == shape
        assert y.dtype == dtype
        for parameter in layer.parameters():
            assert torch.equal(parameter.grad, torch.zeros(32)), shape
        assert x.grad.shape == shape
