"""All solvers against their oracles: matrices, gradients, thresholds, options, degenerate covariances."""

from functools import partial

import numpy as np
import pytest
import torch

from gw_detectron.layers import SOLVERS, Solver
from gw_detectron.ops.solvers.cholesky import pivoted_cholesky_whitening
from gw_detectron.ops.solvers.eigen import (
    zca_entropy_inverse_sqrt,
    zca_inverse_sqrt,
    zca_max_inverse_sqrt,
)

from . import solver_oracle as oracle
from .test_solvers import assert_relatively_close, spectrum, symmetrized_gradient


def random_spd(size: int, seed: int = 0) -> np.ndarray:
    """Return a covariance of unequal variances and a condition number of about 30."""
    factor = np.random.default_rng(seed).normal(size=(size, 20 * size))
    scale = np.random.default_rng(seed + 1).uniform(0.5, 2.0, size)
    return scale[:, None] * (factor @ factor.T) * scale / factor.shape[1]


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("size", [1, 2, 7, 33])
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_it_equals_its_oracle(solver, size, eps, corr):
    covariance = random_spd(size)

    whitening = Solver(solver, 5, eps, corr=corr)(torch.from_numpy(covariance))

    expected = oracle.whitening(solver, covariance, eps=eps, corr=corr)
    assert_relatively_close(whitening.numpy(), expected, 1e-10)


#: the thresholds below raise a third or more of these eigenvalues; none is near a threshold
SPREAD = [5.0, 3.0, 0.8, 0.012, 0.004, 0.001]
#: version, c and eps
THRESHOLDED = {
    "max, theta = c lambda_1": ("max", 0.1, 0.0),
    "max, eps below theta": ("max", 0.1, 0.05),
    "max, eps above theta": ("max", 0.001, 0.05),
    "entropy": ("entropy", 0.0, 0.0),
    "entropy, eps above theta": ("entropy", 0.0, 1.5),
    "nothing raised": ("max", 1e-5, 0.0),
}


@pytest.mark.parametrize("case", THRESHOLDED)
def test_thresholded_gradient_is_algorithm_6(case):
    version, c, eps = THRESHOLDED[case]
    solve = partial(zca_entropy_inverse_sqrt, eps=eps)
    if version == "max":
        solve = partial(zca_max_inverse_sqrt, threshold=c, eps=eps)
    sigma = spectrum(SPREAD)
    grad = np.random.default_rng(1).normal(size=sigma.shape)

    gradient = symmetrized_gradient(solve, sigma, grad)

    expected = oracle.thresholded_backward(grad, sigma, version, c, eps)
    assert_relatively_close(gradient, expected, 1e-9)


def test_replaced_pivots_and_their_gradient():
    sigma = spectrum(SPREAD)
    scales = np.square(oracle.pivoted_cholesky(sigma, 0.0)).sum(1)
    assert 0 < (scales > 1 / 0.02).sum() < 6, "some pivots, but not all, are replaced"

    def whitening_matrix(change):
        changed = torch.from_numpy(sigma) + change + change.mT
        return pivoted_cholesky_whitening(changed, 0.02)

    change = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
    whitening = whitening_matrix(change).detach()

    assert_relatively_close(
        whitening.numpy(), oracle.pivoted_cholesky(sigma, 0.02), 1e-10
    )
    assert torch.autograd.gradcheck(whitening_matrix, (change,), eps=1e-8, atol=1e-4)


def test_large_and_small_variances_keep_their_gradient_in_float32():
    """The gradient goes with variance^(-3/2), near the end of float32's range."""
    for scale in (1e-16, 1e20):
        sigma = spectrum([1.0, 2.0, 3.0, 5.0]) * scale
        grad = np.random.default_rng(1).normal(size=sigma.shape) * scale**0.5
        expected = symmetrized_gradient(zca_inverse_sqrt, sigma, grad)

        single = sigma.astype(np.float32), grad.astype(np.float32)
        gradient = symmetrized_gradient(zca_inverse_sqrt, *single)

        assert_relatively_close(gradient, expected, 1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "svd"}, r"solver \('svd'\): .* \['cholesky', 'newton', 'pca'"),
        ({"num_iters": -1}, r"num_iters \(-1\): .* 0"),
        ({"eps": float("nan")}, r"eps \(nan\)"),
        ({"eps": "1e-5"}, r"eps \('1e-5'\): .* str"),
        ({"name": "zca_max", "threshold": 1.5}, r"threshold \(1.5\): .* from 0 to 1"),
        ({"name": "zca", "threshold": 0.1}, r"threshold \(0.1\): .*'zca'.*'zca_max'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_value(options, named):
    with pytest.raises((ValueError, TypeError), match=named):
        Solver(**options)


def hard(covariance: torch.Tensor, solver: str) -> torch.Tensor:
    return Solver(solver, eps=1e-3)(covariance).pow(3).sum()


@pytest.mark.parametrize("solver", sorted({*SOLVERS} - {"newton", "standardize"}))
def test_a_second_derivative_is_refused_instead_of_wrong(solver):
    covariance = torch.from_numpy(random_spd(4)).requires_grad_()

    (gradient,) = torch.autograd.grad(
        hard(covariance, solver), covariance, create_graph=True
    )

    assert gradient.isfinite().all()
    with pytest.raises(NotImplementedError, match="'newton' and 'standardize'"):
        torch.autograd.grad(gradient.sum(), covariance)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_torch_func_and_meta_tensors(solver):
    stacked = np.stack([random_spd(4, seed) for seed in (0, 2, 4)])
    covariances = torch.from_numpy(stacked).requires_grad_()
    (expected,) = torch.autograd.grad(hard(covariances, solver), covariances)

    each_gradient = torch.func.vmap(torch.func.grad(hard), in_dims=(0, None))
    gradient = each_gradient(covariances.detach(), solver)

    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert Solver(solver)(covariances.to("meta")).shape == covariances.shape
