"""Newton and ZCA against the papers' equations."""

import numpy as np
import pytest
import torch

from gw_detectron.ops.solvers import newton_inverse_sqrt, zca_inverse_sqrt
from gw_detectron.ops.solvers.newton import newton_backward

from . import oracle


def spectrum(eigenvalues, seed: int = 0) -> np.ndarray:
    """Return a symmetric matrix with these eigenvalues in a random basis."""
    q = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(eigenvalues),) * 2))[0]
    matrix = (q * np.asarray(eigenvalues)) @ q.T
    return 0.5 * (matrix + matrix.T)


#: distinct eigenvalues are safe for the published backward of ZCA, which divides by their differences
DISTINCT = {
    "1x1": [0.7],
    "two": [0.3, 2.0],
    "spread": np.geomspace(1e-4, 1e2, 9),
    "small": np.linspace(1e-8, 1e-6, 7),
    "large": np.linspace(1e6, 1e8, 7),
    "odd size": np.linspace(0.5, 3.0, 33),
}
REPEATED = {
    "identity": [1.0] * 6,
    "two pairs": [0.5, 0.5, 2.0, 2.0, 3.0],
    "almost equal": [1.0, 1.0 + 1e-15, 1.0 + 1e-9, 2.0],
    "eps and signal": [1e-5] * 5 + [1.0, 2.0],
}


def symmetrized_gradient(solver, sigma: np.ndarray, grad_w: np.ndarray) -> np.ndarray:
    """Return the symmetric part of dL/dSigma, which alone is defined for symmetric matrices."""
    leaf = torch.from_numpy(sigma).requires_grad_()
    solver(leaf).backward(torch.from_numpy(grad_w))
    gradient = leaf.grad.numpy()
    return 0.5 * (gradient + gradient.T)


def assert_relatively_close(value: np.ndarray, reference: np.ndarray, tol: float) -> None:
    scale = np.abs(reference).max()
    np.testing.assert_allclose(value / scale, reference / scale, rtol=0, atol=tol)


@pytest.mark.parametrize("iters", range(9))
@pytest.mark.parametrize("name", DISTINCT | REPEATED)
def test_newton_equals_the_equations(name, iters):
    sigma = spectrum((DISTINCT | REPEATED)[name])
    grad = np.random.default_rng(1).normal(size=sigma.shape)
    assert_relatively_close(
        newton_inverse_sqrt(torch.from_numpy(sigma), iters).numpy(),
        oracle.newton(sigma, iters),
        1e-10,
    )
    expected = oracle.newton_backward(grad, sigma, iters)
    expected = 0.5 * (expected + expected.T)
    measured = symmetrized_gradient(lambda s: newton_inverse_sqrt(s, iters), sigma, grad)
    assert_relatively_close(measured, expected, 1e-9)
    whitening, measured = newton_backward(
        torch.from_numpy(sigma)[None], torch.from_numpy(grad)[None], iters
    )
    assert_relatively_close(whitening[0].numpy(), oracle.newton(sigma, iters), 1e-10)
    assert_relatively_close(measured[0].numpy(), expected, 1e-9)


@pytest.mark.parametrize("iters", [12, 15, 30])
def test_newton_stays_stable_beyond_convergence(iters):
    """Large eigenvalues converge long before small ones; rounding must not grow in between."""
    sigma = spectrum(np.geomspace(1e-4, 1.0, 64))
    eigenvalues, q = np.linalg.eigh(sigma)
    trace = eigenvalues.sum()
    expected = (q * oracle.newton_scalar(eigenvalues / trace, iters)) @ q.T / np.sqrt(trace)
    w = newton_inverse_sqrt(torch.from_numpy(sigma).float(), iters)
    assert_relatively_close(w.double().numpy(), expected, 1e-4)


@pytest.mark.parametrize("name", DISTINCT | REPEATED)
def test_zca_equals_the_equations(name):
    """The published backward divides by eigenvalue gaps; at equal ones the oracle solves a Lyapunov equation."""
    sigma = spectrum((DISTINCT | REPEATED)[name])
    grad = np.random.default_rng(1).normal(size=sigma.shape)
    assert_relatively_close(
        zca_inverse_sqrt(torch.from_numpy(sigma)).numpy(), oracle.zca(sigma), 1e-10
    )
    expected = (oracle.zca_backward if name in DISTINCT else oracle.lyapunov_backward)(
        grad, sigma
    )
    assert_relatively_close(
        symmetrized_gradient(zca_inverse_sqrt, sigma, grad), 0.5 * (expected + expected.T), 1e-9
    )
