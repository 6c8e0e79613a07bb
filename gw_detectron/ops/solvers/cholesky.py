"""Whitening matrices by Cholesky factorization of the covariance ``sigma``, (..., g, g)."""

from functools import partial

import torch
from torch import Tensor

from ..checks import rounding_floor
from .no_double_backward import whitening_matrix


def cholesky_whitening(sigma: Tensor, *, least: float | Tensor = 0.0) -> Tensor:
    r"""Whiten by Cholesky factorization.

    .. math:: W = D^{-1/2} L^{-1}, \quad \Sigma = L D L^T

    L is unit lower triangular. Each channel is predicted from the preceding channels, and the prediction error is
    scaled to variance one. A channel that the preceding ones determine up to rounding has a row of zeros.

    ``least`` is a lower bound of the elements of D, a number or (..., 1): the eps that ``sigma`` includes. Computed
    elements below it are raised to it, see :mod:`.eigen`.

    Source: On Batch Orthogonalization Layers, Algorithms 1-2. Its :math:`\epsilon I` is part of ``sigma``.
    """
    return whitening_matrix(sigma, least, _factorize, _triangular_backward)


def pivoted_cholesky_whitening(sigma: Tensor, eps: float = 0.0) -> Tensor:
    r"""Whiten by pivoted Cholesky factorization.

    .. math:: W = D^{-1/2} L^{-1} P, \quad P \Sigma P^T = L D L^T

    P chooses the channel of the largest remaining variance first. This keeps all elements of L within [-1, 1] and the
    result accurate where Cholesky whitening is not. Elements of D below ``eps`` become ``eps`` and get no gradient; L
    is unchanged.

    ``sigma`` does not include ``eps``. With eps 0, rows without variance are zero. Row k of the result belongs to the
    k-th chosen channel.

    Source: On Batch Orthogonalization Layers, Algorithms 3-4.
    """
    return whitening_matrix(
        sigma, 0.0, partial(_factorize, pivot=True, eps=eps), _triangular_backward
    )


def _factorize(
    sigma: Tensor, least: float | Tensor, pivot: bool = False, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Factorize the covariance; return W, ratio and mask of the pivots.

    The ratio is D over the pivots; it is 0 for a pivot without variance. The mask is true for kept pivots. The
    floor of a pivot is the rounding error of its channel's variance, unless ``eps`` or ``least`` survives it. A smaller
    pivot counts as zero. Its row is zero unless ``eps`` reaches the floor; otherwise the row would be amplified
    rounding.
    """
    variance, size = sigma.diagonal(dim1=-2, dim2=-1), sigma.shape[-1]
    if pivot:  # eps is not part of sigma: below it only rounding is left to eliminate
        rounding, largest = rounding_floor(variance, size), variance.amax(-1, keepdim=True)
        lost = rounding.minimum(rounding_floor(largest, size, eps))
        rows, d, floor = _eliminate_largest(sigma, rounding.clamp_max(eps).maximum(lost))
    else:
        rows, d, floor = _eliminate_in_order(
            sigma, rounding_floor(variance, size, least), least
        )
    alive = d > floor
    original = alive & (d >= eps)
    replaced = torch.where(original, d, eps)
    scaled = original | (replaced >= floor)
    scale = torch.where(scaled, torch.where(scaled, replaced, 1.0).rsqrt(), 0.0)
    ratio = torch.where(alive, replaced / torch.where(alive, d, 1.0), 0.0)
    return scale[..., None] * rows, ratio, original


# Both eliminate one channel after the other from [Sigma, I], in all matrices at once. After k steps the left half is
# the covariance of the residuals given k channels, the right half the matrix that maps the input to these residuals.
# They return L^{-1} P, D, and the floor of each element of D.


def _eliminate_in_order(
    sigma: Tensor, floor: Tensor, least: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    size = sigma.shape[-1]
    left = _beside_identity(sigma)
    for k in range(size):
        row = left[..., k : k + 1, :]
        d = row[..., 0, k : k + 1].clamp_min(least)
        factors = torch.where(d > floor[..., k : k + 1], left[..., k + 1 :, k] / d, 0.0)
        left[..., k + 1 :, k:].addcmul_(factors[..., None], row[..., k:], value=-1)
    return left[..., size:], left.diagonal(dim1=-2, dim2=-1).clamp_min(least), floor


def _eliminate_largest(sigma: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = sigma.shape[-1]
    left = _beside_identity(sigma)
    remaining = torch.ones_like(floor, dtype=torch.bool)
    rows, pivots, order = [], [], []
    for _ in range(size):
        variance = left[..., :size].diagonal(dim1=-2, dim2=-1)
        chosen = torch.where(remaining, variance, -torch.inf).argmax(-1, keepdim=True)
        row = left.gather(-2, chosen[..., None].expand(*left.shape[:-2], 1, 2 * size))
        d = row[..., 0, :].gather(-1, chosen)
        has_variance = d > floor.gather(-1, chosen)
        remaining = remaining.scatter(-1, chosen, 0)
        column = left.gather(-1, chosen[..., None].expand(*left.shape[:-1], 1))[..., 0]
        factors = torch.where(remaining & has_variance, column / d, 0.0)
        left.addcmul_(factors[..., None], row, value=-1)
        rows.append(row[..., size:])
        pivots.append(d)
        order.append(chosen)
    return torch.cat(rows, -2), torch.cat(pivots, -1), floor.gather(-1, torch.cat(order, -1))


def _beside_identity(sigma: Tensor) -> Tensor:
    identity = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
    return torch.cat((sigma, identity.expand_as(sigma)), -1)


def _triangular_backward(grad: Tensor, w: Tensor, ratio: Tensor, original: Tensor) -> Tensor:
    # dW = -Psi(W dSigma W^T) W, where Psi keeps the strictly lower triangle, its columns times the ratio, and half of
    # the diagonal where D is original. This is the published backward pass in terms of W alone; Eq. 26 has the factors
    # as L (...) D^{-1}.
    inner = grad @ w.mT
    psi = inner.tril(-1) * ratio[..., None, :]
    psi = psi + torch.diag_embed(
        torch.where(original, 0.5 * inner.diagonal(dim1=-2, dim2=-1), 0.0)
    )
    return w.mT @ (-0.5 * (psi + psi.mT)) @ w
