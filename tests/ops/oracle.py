"""Group whitening in float64 numpy, written from the papers' equations alone.

This file shares no code and no algorithm choice with the package: one sample at a time, one group at a time,
the closed-form backward of the papers instead of automatic differentiation. It is slow and meant to be read.

Shapes: C channels, g groups (the side of the covariance matrix), M = C / g * (number of spatial positions).
Source: Group Whitening, section 3 (Eqs. 5-10) and its supplement (Algorithms 1 and 2, Eqs. 1-6).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def divide(x: np.ndarray, g: int) -> np.ndarray:
    """Group division Pi (Eq. 8): one sample (C, *spatial) -> X_G (g, M), groups of neighboring channels."""
    return np.stack([group.reshape(-1) for group in np.split(x, g)])


def undivide(x_g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse group division (Eq. 10): (g, M) -> (C, *spatial)."""
    per_group = shape[0] // x_g.shape[0]
    return np.concatenate([row.reshape(per_group, *shape[1:]) for row in x_g])


def covariance(x_c: np.ndarray, eps: float) -> np.ndarray:
    """Sigma = X_C X_C^T / M + eps I (Algorithm 1, line 7)."""
    g, m = x_c.shape
    return x_c @ x_c.T / m + eps * np.eye(g)


def zca(sigma: np.ndarray) -> np.ndarray:
    """Sigma^(-1/2) = D Lambda^(-1/2) D^T (Eq. 5)."""
    lam, d = np.linalg.eigh(sigma)
    return d @ np.diag(lam**-0.5) @ d.T


def newton_iterates(sigma: np.ndarray, iters: int) -> list[np.ndarray]:
    """P_0 ... P_T with P_k = (3 P_{k-1} - P_{k-1}^3 Sigma_N) / 2 and Sigma_N = Sigma / tr(Sigma) (Eq. 7)."""
    sigma_n = sigma / np.trace(sigma)
    p = [np.eye(len(sigma))]
    for _ in range(iters):
        cube = np.linalg.matrix_power(p[-1], 3)
        p.append(0.5 * (3.0 * p[-1] - cube @ sigma_n))
    return p


def newton(sigma: np.ndarray, iters: int) -> np.ndarray:
    """W = P_T / sqrt(tr(Sigma)) (Eq. 6)."""
    p = newton_iterates(sigma, iters)
    return p[-1] / np.sqrt(np.trace(sigma))


def newton_scalar(s: float | np.ndarray, iters: int) -> np.ndarray:
    """The Newton iteration on one eigenvalue s of Sigma_N: p_0 = 1, p_k = (3 p_{k-1} - p_{k-1}^3 s) / 2.

    All matrices of Eq. 7 are polynomials of Sigma_N, so they share its eigenvectors and the iteration acts on
    each eigenvalue alone.
    """
    s = np.asarray(s, dtype=np.float64)
    p = np.ones_like(s)
    for _ in range(iters):
        p = (3.0 * p - p**3 * s) / 2.0
    return p


def zca_backward(grad_w: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """dL/dSigma of ZCA by Eqs. 1-3, for distinct eigenvalues: K_ij = 1 / (s_i - s_j), K_ii = 0."""
    lam, d = np.linalg.eigh(sigma)
    gap = lam[:, None] - lam[None, :]
    np.fill_diagonal(gap, np.inf)
    k = 1.0 / gap

    grad_lam = d.T @ grad_w @ d @ np.diag(-0.5 * lam**-1.5)  # Eq. 1
    grad_d = (grad_w + grad_w.T) @ d @ np.diag(lam**-0.5)  # Eq. 2

    inner = k.T * (d.T @ grad_d) + np.diag(np.diag(grad_lam))
    return d @ inner @ d.T  # Eq. 3


def lyapunov_backward(grad_w: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """dL/dSigma of ZCA without a division by eigenvalue gaps: valid for equal eigenvalues too.

    With S = Sigma^(1/2) and W = S^(-1): dW = -W dS W and S dS + dS S = dSigma. The map dS -> dSigma is self-
    adjoint, so dL/dSigma is the X that solves S X + X S = -W dL/dW W, here as a linear system of g^2
    unknowns.
    """
    identity = np.eye(len(sigma))
    w = zca(sigma)
    s = sigma @ w
    symmetric = 0.5 * (grad_w + grad_w.T)

    system = np.kron(s, identity) + np.kron(identity, s)
    right = -(w @ symmetric @ w)
    return np.linalg.solve(system, right.reshape(-1)).reshape(sigma.shape)


def newton_backward(grad_w: np.ndarray, sigma: np.ndarray, iters: int) -> np.ndarray:
    """dL/dSigma of the Newton iteration by Eqs. 5 and 6."""
    trace = np.trace(sigma)
    sigma_n = sigma / trace
    *p, last = newton_iterates(sigma, iters)

    grad_p = grad_w / np.sqrt(trace)
    grad_sigma_n = np.zeros_like(sigma)
    for q in reversed(p):
        grad_sigma_n += -0.5 * (q @ q @ q).T @ grad_p
        grad_p = (
            1.5 * grad_p
            - 0.5 * grad_p @ (q @ q @ sigma_n).T
            - 0.5 * (q @ q).T @ grad_p @ sigma_n.T
            - 0.5 * q.T @ grad_p @ (q @ sigma_n).T
        )

    of_trace = np.trace(grad_sigma_n @ sigma) / trace**2
    of_root = np.trace(grad_w.T @ last) / (2.0 * trace**1.5)
    return grad_sigma_n / trace - (of_trace + of_root) * np.eye(len(sigma))


@dataclass(frozen=True)
class Setting:
    """What a group whitening layer is told: groups g, Newton iterations T, eps and the solver's name."""

    groups: int
    iters: int = 5
    eps: float = 1e-5
    solver: str = "newton"

    def forward(self, sigma: np.ndarray) -> np.ndarray:
        """psi^f: covariance (g, g) -> whitening matrix (g, g)."""
        if self.solver == "zca":
            return zca(sigma)
        return newton(sigma, self.iters)

    def backward(self, grad_w: np.ndarray, sigma: np.ndarray) -> np.ndarray:
        """psi^b: dL/dW -> dL/dSigma."""
        if self.solver == "zca":
            return zca_backward(grad_w, sigma)
        return newton_backward(grad_w, sigma, self.iters)


def _per_channel(
    value: np.ndarray | None, ndim: int, default: float
) -> np.ndarray | float:
    if value is None:
        return default
    spatial = [1] * (ndim - 2)
    return value.reshape(-1, *spatial)


def _center(sample: np.ndarray, g: int) -> np.ndarray:
    """X_C = X_G - mu 1^T of one sample (Algorithm 1, lines 5 and 6)."""
    x_g = divide(sample, g)
    return x_g - x_g.mean(axis=1, keepdims=True)


def group_whiten(
    x: np.ndarray,
    setting: Setting,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Algorithm 1 on every sample of x (N, C, *spatial), then the affine map per channel."""
    x_hat = np.empty_like(x)
    for n, sample in enumerate(x):
        x_c = _center(sample, setting.groups)
        w = setting.forward(covariance(x_c, setting.eps))
        x_hat[n] = undivide(w @ x_c, sample.shape)

    scale = _per_channel(weight, x.ndim, 1.0)
    shift = _per_channel(bias, x.ndim, 0.0)
    return x_hat * scale + shift


def group_whiten_backward(
    x: np.ndarray,
    grad_out: np.ndarray,
    setting: Setting,
    weight: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 2 on every sample: dL/dx (N, C, *spatial), dL/dweight (C,) and dL/dbias (C,)."""
    axes = (0, *range(2, x.ndim))
    grad_weight = (grad_out * group_whiten(x, setting)).sum(axis=axes)
    grad_bias = grad_out.sum(axis=axes)

    grad_x_hat = grad_out * _per_channel(weight, x.ndim, 1.0)
    grad_x = np.empty_like(x)
    for n, sample in enumerate(x):
        x_c = _center(sample, setting.groups)
        m = x_c.shape[1]
        sigma = covariance(x_c, setting.eps)
        w = setting.forward(sigma)

        grad_g = divide(grad_x_hat[n], setting.groups)
        grad_sigma = setting.backward(grad_g @ x_c.T, sigma)  # lines 4 and 5
        f = grad_g.mean(axis=1, keepdims=True)  # line 6
        grad_g = w @ (grad_g - f) + (grad_sigma + grad_sigma.T) @ x_c / m  # line 7
        grad_x[n] = undivide(grad_g, sample.shape)
    return grad_x, grad_weight, grad_bias
