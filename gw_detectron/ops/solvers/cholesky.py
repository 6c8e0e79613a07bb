"""Whitening matrices by Cholesky factorization of the covariance ``sigma``, (..., g, g)."""

from functools import partial

import torch
from torch import Tensor

from ..matrices import diagonal, identity_like, inverse_root, scale_columns, scale_rows
from ..numerics import rounding_floor
from .no_double_backward import whitening_matrix


def cholesky_whitening(sigma: Tensor, *, least: float | Tensor = 0.0) -> Tensor:
    r"""Whiten by Cholesky factorization.

    .. math:: W = D^{-1/2} L^{-1}, \quad \Sigma = L D L^T

    L is unit lower triangular. Each channel is predicted from the preceding channels, and the
    prediction error is scaled to variance one. A channel that the preceding ones determine up to
    rounding has a row of zeros.

    ``least`` is a lower bound of the elements of D, a number or (..., 1): the eps that ``sigma``
    includes. Computed elements below it are raised to it, see :mod:`.eigen`.

    Source: On Batch Orthogonalization Layers, Algorithms 1-2. Its :math:`\epsilon I` is part of
        ``sigma``.
    """
    return whitening_matrix(sigma, least, _factorize, _triangular_backward)


def pivoted_cholesky_whitening(sigma: Tensor, eps: float = 0.0) -> Tensor:
    r"""Whiten by pivoted Cholesky factorization.

    .. math:: W = D^{-1/2} L^{-1} P, \quad P \Sigma P^T = L D L^T

    P chooses the channel of the largest remaining variance first. This keeps all elements of L
    within [-1, 1] and the result accurate where Cholesky whitening is not. Elements of D below
    ``eps`` become ``eps`` and get no gradient; L is unchanged.

    ``sigma`` does not include ``eps``. With eps 0, rows without variance are zero. Row k of the
    result belongs to the k-th chosen channel.

    Source: On Batch Orthogonalization Layers, Algorithms 3-4.
    """
    solve = partial(_factorize_pivoted, eps=eps)
    return whitening_matrix(sigma, 0.0, solve, _triangular_backward)


def _factorize(sigma: Tensor, least: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factorize the covariance; return W, ratio and mask as :func:`_scale_rows` does."""
    variance = diagonal(sigma)
    floor = rounding_floor(variance, sigma.shape[-1], least)
    rows, d = _eliminate_in_order(sigma, floor, least)
    return _scale_rows(rows, d, floor)


def _factorize_pivoted(
    sigma: Tensor, _least: float | Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Factorize the covariance with pivoting; ``eps`` is not part of it."""
    size = sigma.shape[-1]
    variance = diagonal(sigma)
    largest = variance.amax(-1, keepdim=True)

    # below eps only rounding is left to eliminate
    rounding = rounding_floor(variance, size)
    lost = rounding.minimum(rounding_floor(largest, size, eps))
    floor = rounding.clamp_max(eps).maximum(lost)

    rows, d, floor = _eliminate_largest(sigma, floor)
    return _scale_rows(rows, d, floor, eps)


def _scale_rows(
    rows: Tensor, d: Tensor, floor: Tensor, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale the rows of L^{-1} P; return W = D^{-1/2} L^{-1} P, ratio and mask of the pivots.

    The ratio is D over the pivots; it is 0 for a pivot without variance. The mask is true for kept
    pivots. The floor of a pivot is the rounding error of its channel's variance, unless the eps of
    the covariance survives it. A smaller pivot counts as zero. Its row is zero unless ``eps``
    reaches the floor; otherwise the row would be amplified rounding.
    """
    alive = d > floor
    original = alive & (d >= eps)
    replaced = torch.where(original, d, eps)
    scale = inverse_root(replaced, original | (replaced >= floor))

    divisor = torch.where(alive, d, 1.0)
    ratio = torch.where(alive, replaced / divisor, 0.0)
    return scale_rows(rows, scale), ratio, original


# Both eliminate one channel after the other from [Sigma, I], in all matrices at once. After k steps
# the left half is the covariance of the residuals given k channels, the right half the matrix that
# maps the input to these residuals. They return L^{-1} P and D, with pivoting also the floors in
# the order of D.


def _eliminate_in_order(
    sigma: Tensor, floor: Tensor, least: float | Tensor
) -> tuple[Tensor, Tensor]:
    size = sigma.shape[-1]
    left = _beside_identity(sigma)

    for k in range(size):
        row = left[..., k : k + 1, k:]
        below = left[..., k + 1 :, k:]

        d = row[..., 0, :1].clamp_min(least)
        has_variance = d > floor[..., k : k + 1]
        factors = torch.where(has_variance, below[..., 0] / d, 0.0)
        below.addcmul_(factors[..., None], row, value=-1)

    pivots = diagonal(left).clamp_min(least)
    return left[..., size:], pivots


def _eliminate_largest(sigma: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = sigma.shape[-1]
    left = _beside_identity(sigma)
    remaining = torch.ones_like(floor, dtype=torch.bool)
    rows = []
    pivots = []
    floors = []

    for _ in range(size):
        variance = torch.where(remaining, diagonal(left[..., :size]), -torch.inf)
        chosen = variance.argmax(-1, keepdim=True)
        remaining = remaining.scatter(-1, chosen, 0)

        # not take_along_dim, which fixes the number of matrices in an export
        row_index = chosen[..., None].expand(*left.shape[:-2], 1, 2 * size)
        row = left.gather(-2, row_index)
        column_index = chosen[..., None].expand(*left.shape[:-1], 1)
        column = left.gather(-1, column_index)[..., 0]

        d = row[..., 0, :].gather(-1, chosen)
        d_floor = floor.gather(-1, chosen)

        eliminated = remaining & (d > d_floor)
        factors = torch.where(eliminated, column / d, 0.0)
        left.addcmul_(factors[..., None], row, value=-1)

        rows.append(row[..., size:])
        pivots.append(d)
        floors.append(d_floor)

    return (
        torch.cat(rows, -2),
        torch.cat(pivots, -1),
        torch.cat(floors, -1),
    )


def _beside_identity(sigma: Tensor) -> Tensor:
    identity = identity_like(sigma).expand_as(sigma)
    return torch.cat((sigma, identity), -1)


def _triangular_backward(
    grad: Tensor, w: Tensor, ratio: Tensor, original: Tensor
) -> Tensor:
    r"""Return dL/dSigma by :math:`dW = -\Psi(W d\Sigma W^T) W`.

    Psi keeps the strictly lower triangle, its columns times the ratio, and half of the diagonal
    where D is original. This is the published backward pass in terms of W alone; Eq. 26 has the
    factors as :math:`L (...) D^{-1}`.
    """
    inner = grad @ w.mT
    half = torch.where(original, 0.5 * diagonal(inner), 0.0)
    psi = scale_columns(inner.tril(-1), ratio)
    psi = psi + torch.diag_embed(half)
    symmetric = -0.5 * (psi + psi.mT)
    return w.mT @ symmetric @ w
