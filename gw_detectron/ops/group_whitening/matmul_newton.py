r"""Newton's iteration and its backward pass in few matrix products.

Every matrix of the iteration is a polynomial of :math:`S = \Sigma / \mathrm{tr}(\Sigma)`, so they all commute and are
symmetric. With :math:`Q_k = P_k^2 S` a step is :math:`P_{k+1} = P_k R_k`, :math:`R_k = (3 I - Q_k) / 2`,
:math:`Q_{k+1} = Q_k R_k^2`, and two steps are one factor that costs two products instead of six:

.. math::
    R_k R_{k+1} = \tfrac{1}{16} (36 I - 39 Q + 27 Q^2 - 9 Q^3 + Q^4) = F + \tfrac{9}{4} I, \quad
    F = Z^2 + \tfrac{27}{16} (Z - \tfrac{23}{72} Q), \quad Z = \tfrac{1}{4} Q^2 - \tfrac{9}{8} Q, \quad Q = Q_k .

The factor is stored without the identity: a product with :math:`F + c I` is a product with F plus c times the other
matrix. Five steps take 10 products instead of 15. Six of the 10 are squares, whose derivative costs one product instead
of two.

The derivative of a polynomial f at a symmetric matrix is self-adjoint. So the gradient of S is the derivative of f in
the direction of the (symmetric) gradient of f(S). It is computed in forward mode, each matrix with its tangent, and
only the covariance is saved for backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import zero_variance_threshold

#: elements of the matrices that a CPU processes at a time, so that they stay cached: 32 matrices of 64 x 64
_ELEMENTS = 1 << 17


class _Matrix(NamedTuple):
    """A batch of symmetric matrices and, for backward, its derivative."""

    value: Tensor
    tangent: Tensor | None


def count_products(num_iters: int) -> tuple[int, int]:
    """Return the number of products of the iteration, and of its tangents."""
    values = tangents = 0
    for done in range(0, num_iters, 2):
        two_steps, more, first = done + 2 <= num_iters, done + 2 < num_iters, done == 0
        values += 2 * two_steps + 2 * more + (not first)
        tangents += 2 * two_steps + 3 * more + 2 * (not first)
    return values, tangents


def newton(sigma: Tensor, num_iters: int) -> Tensor:
    """Compute :func:`gw_detectron.layers.newton_inverse_sqrt` of (N, g, g) in fewer products."""
    parts = [_newton(part, num_iters) for part in sigma.split(_batch_size(sigma))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def newton_backward(sigma: Tensor, grad: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """Return the whitening matrices and the symmetric dL/dSigma, given ``grad`` = dL/dW.

    Source: equal to Group Whitening supplement, Eqs. 5-6.
    """
    size = _batch_size(sigma)
    parts = [_newton_backward(*part, num_iters) for part in zip(sigma.split(size), grad.split(size), strict=True)]
    if len(parts) == 1:
        return parts[0]
    whitening, grad_sigma = zip(*parts, strict=True)
    return torch.cat(whitening), torch.cat(grad_sigma)


def _batch_size(sigma: Tensor) -> int:
    """Return the number of matrices to process at a time."""
    return max(1, _ELEMENTS // sigma.shape[1:].numel()) if sigma.device.type == "cpu" else max(1, len(sigma))


def _newton(sigma: Tensor, num_iters: int) -> Tensor:
    inverse = _inverse_trace(sigma)
    return _iterate(_Matrix(sigma * inverse, None), num_iters).value * inverse.sqrt()


def _newton_backward(sigma: Tensor, grad: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    inverse = _inverse_trace(sigma)
    root = inverse.sqrt()
    s, direction = sigma * inverse, (grad + grad.mT).mul_(0.5 * root)
    p, tangent = _iterate(_Matrix(s, direction), num_iters)
    assert tangent is not None  # S had one
    # S is divided by the trace and W by its root: the gradient through either is a multiple of the identity
    trace_gradient = torch.linalg.vecdot(tangent.flatten(1), s.flatten(1))
    trace_gradient += 0.5 * torch.linalg.vecdot(direction.flatten(1), p.flatten(1))
    return p * root, _add_identity(tangent, -trace_gradient[:, None]).mul_(inverse)


def _inverse_trace(sigma: Tensor) -> Tensor:
    """Return 1 / tr(sigma), (N, 1, 1); 0 without variance."""
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    return trace.masked_fill(trace <= zero_variance_threshold(sigma.dtype), torch.inf).reciprocal()


def _iterate(s: _Matrix, num_iters: int) -> _Matrix:
    """Return P after ``num_iters`` steps; ``s`` is unchanged."""
    p, q = None, s
    for remaining in range(num_iters, 0, -2):
        factor, identity_factor = (_two_steps if remaining > 1 else _one_step)(q)
        if remaining > 2:
            q = _product(q, _square(factor, 1, factor, 2 * identity_factor), q, identity_factor**2)
        if p is None:
            _add_identity(factor.value, identity_factor)
            p = factor
        else:
            p = _product(p, factor, p, identity_factor)
    if p is None:
        p = _scaled(s, 0)
        _add_identity(p.value, 1)
    return p


def _one_step(q: _Matrix) -> tuple[_Matrix, float]:
    """Return (M, c), where M + c I is the factor R."""
    return _scaled(q, -1 / 2), 3 / 2


def _two_steps(q: _Matrix) -> tuple[_Matrix, float]:
    """Return (F, c), where F + c I covers two steps."""
    z = _square(q, 1 / 4, q, -9 / 8)
    return _square(z, 1, _add(z, q, -23 / 72), 27 / 16), 9 / 4


def _scaled(a: _Matrix, by: float) -> _Matrix:
    return _Matrix(a.value * by, None if a.tangent is None else a.tangent * by)


def _add(a: _Matrix, b: _Matrix, alpha: float) -> _Matrix:
    """Return a + alpha b."""
    value = torch.add(a.value, b.value, alpha=alpha)
    if a.tangent is None or b.tangent is None:
        return _Matrix(value, None)
    return _Matrix(value, torch.add(a.tangent, b.tangent, alpha=alpha))


def _product(a: _Matrix, b: _Matrix, c: _Matrix, beta: float) -> _Matrix:
    """Return a b + beta c."""
    value = torch.baddbmm(c.value, a.value, b.value, beta=beta)
    if a.tangent is None or b.tangent is None or c.tangent is None:
        return _Matrix(value, None)
    return _Matrix(value, torch.baddbmm(c.tangent, a.value, b.tangent, beta=beta).baddbmm_(a.tangent, b.value))


def _square(a: _Matrix, alpha: float, c: _Matrix, beta: float) -> _Matrix:
    """Return alpha a^2 + beta c."""
    value = torch.baddbmm(c.value, a.value, a.value, beta=beta, alpha=alpha)
    if a.tangent is None or c.tangent is None:
        return _Matrix(value, None)
    half = torch.baddbmm(c.tangent, a.value, a.tangent, beta=beta / 2, alpha=alpha)
    return _Matrix(value, half + half.mT)


def _add_identity(matrix: Tensor, value: float | Tensor) -> Tensor:
    """Add a number, or one per matrix (N, 1), to the diagonal."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(value)
    return matrix
