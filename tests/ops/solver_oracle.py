"""Every solver's whitening matrix in float64 numpy and scipy, one matrix at a time, from the papers' equations alone.

No algorithm is the package's: singular values instead of eigenvalues, LAPACK's own pivoted factorization, and the
published backward pass of the thresholded versions with its quotients of eigenvalue gaps.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from .oracle import newton, zca


def whitening(
    name: str,
    covariance: np.ndarray,
    iters: int = 5,
    eps: float = 0.0,
    threshold: float = 0.01,
    corr: bool = False,
) -> np.ndarray:
    """psi(Sigma) of a covariance (g, g) without eps; Table I of Batch Orthogonalization for ``corr``."""
    sigma = covariance
    if name != "pivoted_cholesky":
        sigma = sigma + eps * np.eye(len(sigma))
    scale = np.ones(len(sigma))
    if corr:
        scale = 1 / np.sqrt(np.diag(sigma))
        sigma = np.outer(scale, scale) * sigma
        np.fill_diagonal(sigma, 1.0)

    matrices = {
        "newton": lambda: newton(sigma, iters),
        "zca": lambda: zca(sigma),
        "zca_max": lambda: zca_max(sigma, threshold, eps),
        "zca_entropy": lambda: zca_entropy(sigma, eps),
        "pca": lambda: pca(sigma),
        "cholesky": lambda: cholesky(sigma),
        "pivoted_cholesky": lambda: pivoted_cholesky(sigma, eps),
        "standardize": lambda: np.diag(1 / np.sqrt(np.diag(sigma))),
    }
    return matrices[name]() @ np.diag(scale)


def zca_max(sigma: np.ndarray, c: float, eps: float) -> np.ndarray:
    """Algorithm 5, version "max": theta = c lambda_max."""
    u, lam, _ = np.linalg.svd(sigma)
    return _lifted(u, lam, c * lam.max(), eps)


def zca_entropy(sigma: np.ndarray, eps: float) -> np.ndarray:
    """Algorithm 5, version "entropy": theta = the eigenvalue at the effective rank, rounded to the nearest integer."""
    u, lam, _ = np.linalg.svd(sigma)
    return _lifted(u, lam, lam[effective_rank(lam) - 1], eps)


def effective_rank(lam: np.ndarray) -> int:
    """The nearest integer to exp of the entropy of the normalized eigenvalues."""
    p = lam[lam > 0] / lam.sum()
    entropy = -(p * np.log(p)).sum()
    return round(np.exp(entropy))


def _lifted(u: np.ndarray, lam: np.ndarray, theta: float, eps: float) -> np.ndarray:
    lifted = np.maximum(lam, max(theta, eps))
    return u @ np.diag(lifted**-0.5) @ u.T


def pca(sigma: np.ndarray) -> np.ndarray:
    """Lambda^(-1/2) D^T, eigenvalues in descending order, the first element of every eigenvector positive."""
    d, lam, _ = np.linalg.svd(sigma)
    return np.diag(lam**-0.5) @ (d * np.sign(d[0])).T


def cholesky(sigma: np.ndarray) -> np.ndarray:
    """Algorithm 1: L = chol(Sigma), D = (L o I)^2, L <- L (L o I)^(-1), A = D^(-1/2) L^(-1)."""
    factor = scipy.linalg.cholesky(sigma, lower=True)
    d = np.diag(factor) ** 2
    unit = factor / np.diag(factor)
    return np.diag(d**-0.5) @ np.linalg.inv(unit)


def pivoted_cholesky(sigma: np.ndarray, eps: float) -> np.ndarray:
    """Algorithm 3 on LAPACK's Cholesky factorization with complete pivoting: d < eps becomes eps, L stays."""
    factor, pivots, rank, _ = scipy.linalg.lapack.dpstrf(sigma, lower=1)
    size = len(sigma)
    p = np.eye(size)[pivots - 1]
    factor = np.tril(factor)

    unit = np.eye(size)
    d = np.zeros(size)
    for k in range(rank):  # what is behind the rank was not factorized
        d[k] = factor[k, k] ** 2
        unit[:, k] = factor[:, k] / factor[k, k]

    d[d < eps] = eps
    d[d == 0] = np.inf
    return np.diag(d**-0.5) @ np.linalg.inv(unit) @ p


def thresholded_backward(
    grad_w: np.ndarray, sigma: np.ndarray, version: str, c: float, eps: float
) -> np.ndarray:
    """Algorithm 6 without Gamma and with K infinite, for distinct eigenvalues; F is of the eigenvalues of Sigma."""
    u, lam, _ = np.linalg.svd(sigma)
    heir, slope = (0, c) if version == "max" else (effective_rank(lam) - 1, 1.0)
    theta = slope * lam[heir]
    floor = max(theta, eps)
    m = lam < floor
    lifted = np.maximum(lam, floor)

    grad_a = 0.5 * (grad_w + grad_w.T)
    grad_u = 2 * grad_a @ u @ np.diag(lifted**-0.5)
    grad_u = 0.5 * (grad_u - u @ grad_u.T @ u)

    grad_lam = -0.5 * np.diag(u.T @ grad_a @ u) * lifted**-1.5
    if eps <= theta:
        grad_lam[heir] += slope * grad_lam[m].sum()
    grad_lam[m] = 0

    gap = lam[None, :] - lam[:, None]
    np.fill_diagonal(gap, np.inf)
    inner = np.diag(grad_lam) + (u.T @ grad_u) / gap
    return u @ inner @ u.T


def batch_whiten(x: np.ndarray, width: int, name: str, **options: float) -> np.ndarray:
    """Batch whitening of x (N, C, *spatial), group after group, the last one with what is left of the channels."""
    out = np.empty_like(x)
    for first in range(0, x.shape[1], width):
        group = slice(first, first + width)
        mean, sigma = batch_moments(x[:, group])
        w = whitening(name, sigma, **options)
        for n, sample in enumerate(x):
            for position in np.ndindex(*x.shape[2:]):
                column = sample[(group, *position)]
                out[(n, group, *position)] = w @ (column - mean)
    return out


def batch_moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance (divided by m) of the channels of x (N, C, *spatial)."""
    columns = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
    return columns.mean(axis=0), np.atleast_2d(np.cov(columns, rowvar=False, bias=True))
