r"""Newton's iteration ("ItN"), the published solver of Group Whitening, in few matrix products.

Every matrix of the iteration is a polynomial of :math:`S = \Sigma / \mathrm{tr}(\Sigma)`, so they all
commute and are symmetric. With :math:`Q_k = P_k^2 S` a step is :math:`P_{k+1} = P_k R_k`,
:math:`R_k = (3 I - Q_k) / 2`, :math:`Q_{k+1} = Q_k R_k^2`, and two steps are one factor that costs
two products instead of six:

.. math::
    R_k R_{k+1} = \tfrac{1}{16} (36 I - 39 Q + 27 Q^2 - 9 Q^3 + Q^4) = F + \tfrac{9}{4} I, \quad
    F = Z^2 + \tfrac{27}{16} (Z - \tfrac{23}{72} Q), \quad Z = \tfrac{1}{4} Q^2 - \tfrac{9}{8} Q, \quad Q = Q_k .

The factor is stored without the identity, as F: a product with :math:`F + c I` is one with F plus c
times the other matrix. Five steps take 10 products instead of 15. Six of the 10 are squares, whose
derivative costs one product instead of two.

The derivative of a polynomial f at a symmetric matrix is self-adjoint. So the gradient of S is the
derivative of f in the direction of the (symmetric) gradient of f(S). It is computed in forward
mode, each matrix with its tangent, and only the covariance is saved for backward.
"""

import math

import torch
from torch import Tensor

from ..matrices import diagonal, diagonal_values, identity_like
from ..numerics import zero_variance_threshold

#: a batch of symmetric matrices (N, g, g); for backward two: the matrices and their tangents
_Matrix = list[Tensor]


def newton_inverse_sqrt(sigma: Tensor, num_iters: int = 5) -> Tensor:
    r"""Approximate :math:`\Sigma^{-1/2}` by ``num_iters`` steps of Newton's iteration ("ItN").

    .. math::
        \Sigma_N = \Sigma / \mathrm{tr}(\Sigma), \quad P_0 = I, \quad
        P_k = \tfrac{1}{2} (3 P_{k-1} - P_{k-1}^3 \Sigma_N), \quad W = P_T / \sqrt{\mathrm{tr}(\Sigma)}

    With the published setting (5 steps, g = 64) the iteration has not converged: whitened Gaussian
    input has variance 0.586, not 1. Pretrained weights depend on exactly this matrix, so more steps
    or an exact solver is another network.

    With :math:`P_{k-1}^3 \Sigma_N` computed anew in each step, as in Figure 1 of the supplement,
    rounding grows without bound from about 12 steps on in float32; here only for singular matrices
    (fewer columns than channels), from about 25 steps on. The solver ``zca`` gives the exact matrix.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).
        num_iters: the number of steps T; 0 gives :math:`I / \sqrt{\mathrm{tr}(\Sigma)}`.

    Returns:
        The whitening matrices W, (..., g, g).

    Source: Group Whitening, Eqs. 6-7; Higham, "Stable iterations for the matrix square root" (1997).
    """
    inverse, root = _inverse_trace(sigma)
    batch = math.prod(sigma.shape[:-2])  # not -1: it may be empty
    normalized = sigma * inverse
    s = normalized.reshape(batch, *sigma.shape[-2:])
    (p,) = _iterate([s], num_iters)
    return p.reshape(sigma.shape) * root


def newton_backward(
    sigma: Tensor, grad: Tensor, num_iters: int
) -> tuple[Tensor, Tensor]:
    r"""Return the whitening matrices of (N, g, g) and the symmetric dL/dSigma.

    With :math:`t = \mathrm{tr}(\Sigma)`, :math:`W = P(S) / \sqrt t` and ``grad`` = dL/dW,

    .. math::
        D = \tfrac{1}{2} (dL/dW + dL/dW^T) / \sqrt t, \quad T = P'(S)[D], \quad
        dL/d\Sigma = \tfrac{1}{t} \big( T - (\langle T, S \rangle
        + \tfrac{1}{2} \langle D, P \rangle) I \big) .

    Source: equal to Group Whitening supplement, Eqs. 5-6.
    """
    inverse, root = _inverse_trace(sigma)
    s = sigma * inverse
    direction = (grad + grad.mT).mul_(0.5 * root)
    p, tangent = _iterate([s, direction], num_iters)

    # S is divided by the trace and W by its root: either gradient is a multiple of the identity
    trace_gradient = _inner_product(tangent, s)
    trace_gradient += 0.5 * _inner_product(direction, p)
    diagonal(tangent).sub_(trace_gradient[:, None])

    whitening = p * root
    grad_sigma = tangent.mul_(inverse)
    return whitening, grad_sigma


def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


def _inverse_trace(sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / tr(sigma) and its square root, (..., 1, 1); 0 without variance."""
    trace = diagonal_values(sigma).sum(-1)[..., None, None]
    is_zero = trace <= zero_variance_threshold(sigma.dtype)
    # the reciprocal root of infinity is 0, and so is its derivative
    root = trace.masked_fill(is_zero, torch.inf).rsqrt()
    return root * root, root


def _iterate(s: _Matrix, num_iters: int) -> _Matrix:
    """Return P after ``num_iters`` steps."""
    p = None
    q = s
    for remaining in range(num_iters, 0, -2):
        if remaining > 1:
            f = _two_steps(q)
            c = 9 / 4
        else:
            f = _scaled(q, -1 / 2)
            c = 3 / 2

        if remaining > 2:
            factor_squared = _square(f, 1, f, 2 * c)
            q = _product(q, factor_squared, q, c**2)

        p = _add_identity(f, c) if p is None else _product(p, f, p, c)

    if p is None:  # without any step
        return _add_identity(_scaled(s, 0), 1)
    return p


def _two_steps(q: _Matrix) -> _Matrix:
    """Return F of the factor that covers two steps."""
    z = _square(q, 1 / 4, q, -9 / 8)
    mixed = [torch.add(a, b, alpha=-23 / 72) for a, b in zip(z, q, strict=True)]
    return _square(z, 1, mixed, 27 / 16)


def _add_identity(a: _Matrix, factor: float) -> _Matrix:
    """Return a + factor I."""
    value, *tangent = a
    value = torch.add(value, identity_like(value), alpha=factor)
    return [value, *tangent]


def _scaled(a: _Matrix, by: float) -> _Matrix:
    return [matrix * by for matrix in a]


def _product(a: _Matrix, b: _Matrix, c: _Matrix, beta: float) -> _Matrix:
    """Return a b + beta c; the tangent is a db + da b + beta dc."""
    product = _multiply_add(c[0], a[0], b[0], beta, 1)
    if len(a) == 1:  # without tangents
        return [product]

    tangent = torch.baddbmm(c[1], a[0], b[1], beta=beta)
    tangent.baddbmm_(a[1], b[0])
    return [product, tangent]


def _square(a: _Matrix, alpha: float, c: _Matrix, beta: float) -> _Matrix:
    """Return alpha a^2 + beta c; the tangent is alpha (a da + da a) + beta dc."""
    square = _multiply_add(c[0], a[0], a[0], beta, alpha)
    if len(a) == 1:  # without tangents
        return [square]

    half = torch.baddbmm(c[1], a[0], a[1], beta=beta / 2, alpha=alpha)
    return [square, half + half.mT]


def _multiply_add(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta c + alpha a b."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return beta * c + alpha * (a @ b)  # fvcore does not count baddbmm
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)
