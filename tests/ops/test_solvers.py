"""Newton and ZCA against the papers' equations."""

import numpy as np
import pytest
import torch

from gw_detectron.ops.solvers import newton_inverse_sqrt, zca_inverse_sqrt
from gw_detectron.ops.solvers.newton import newton_backward

from . import oracle


def spectrum(eigenvalues, seed: int = 0) -> np.ndarray:
    """Return a symmetric matrix with these eigenvalues in a random basis."""
    size = len(eigenvalues)
    noise = np.random.default_rng(seed).normal(size=(size, size))
    q, _ = np.linalg.qr(noise)
    return symmetric((q * np.asarray(eigenvalues)) @ q.T)


def symmetric(matrix: np.ndarray) -> np.ndarray:
    """Return the symmetric part."""
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
    return symmetric(leaf.grad.numpy())


def assert_relatively_close(
    value: np.ndarray, reference: np.ndarray, tol: float
) -> None:
    scale = np.abs(reference).max()
    np.testing.assert_allclose(value / scale, reference / scale, rtol=0, atol=tol)


@pytest.mark.parametrize("iters", range(9))
@pytest.mark.parametrize("name", DISTINCT | REPEATED)
def test_newton_equals_the_equations(name, iters):
    sigma = spectrum((DISTINCT | REPEATED)[name])
    grad = np.random.default_rng(1).normal(size=sigma.shape)
    expected = oracle.newton(sigma, iters)
    expected_grad = symmetric(oracle.newton_backward(grad, sigma, iters))

    whitening = newton_inverse_sqrt(torch.from_numpy(sigma), iters)
    gradient = symmetrized_gradient(
        lambda s: newton_inverse_sqrt(s, iters), sigma, grad
    )
    # the oracle loses digits, too: 1.1e-10 after 8 steps at a condition of 1e6, with AVX2
    assert_relatively_close(whitening.numpy(), expected, 3e-10)
    assert_relatively_close(gradient, expected_grad, 1e-9)

    batch = torch.from_numpy(np.stack((sigma, grad)))[:, None]
    whitening, gradient = newton_backward(*batch, iters)
    assert_relatively_close(whitening[0].numpy(), expected, 3e-10)
    assert_relatively_close(gradient[0].numpy(), expected_grad, 1e-9)


@pytest.mark.parametrize("iters", [12, 15, 30])
def test_newton_stays_stable_beyond_convergence(iters):
    """Large eigenvalues converge long before small ones; rounding must not grow in between."""
    sigma = spectrum(np.geomspace(1e-4, 1.0, 64))
    eigenvalues, q = np.linalg.eigh(sigma)
    trace = eigenvalues.sum()
    factors = oracle.newton_scalar(eigenvalues / trace, iters)
    expected = (q * factors) @ q.T / np.sqrt(trace)

    w = newton_inverse_sqrt(torch.from_numpy(sigma).float(), iters)

    assert_relatively_close(w.double().numpy(), expected, 1e-4)


@pytest.mark.parametrize("name", DISTINCT | REPEATED)
def test_zca_equals_the_equations(name):
    """The published backward divides by eigenvalue gaps; at equal ones the oracle solves a Lyapunov equation."""
    sigma = spectrum((DISTINCT | REPEATED)[name])
    grad = np.random.default_rng(1).normal(size=sigma.shape)
    backward = oracle.zca_backward if name in DISTINCT else oracle.lyapunov_backward

    whitening = zca_inverse_sqrt(torch.from_numpy(sigma))
    gradient = symmetrized_gradient(zca_inverse_sqrt, sigma, grad)

    assert_relatively_close(whitening.numpy(), oracle.zca(sigma), 1e-10)
    assert_relatively_close(gradient, symmetric(backward(grad, sigma)), 1e-9)
