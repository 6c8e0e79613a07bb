r"""Newton's iteration and its backward pass in few matrix products and little memory.

Every matrix of the iteration is a polynomial of :math:`S = \Sigma / \mathrm{tr}(\Sigma)`, so they all commute and are
symmetric. With :math:`Q_k = P_k^2 S` a step is :math:`P_{k+1} = P_k R_k`, :math:`R_k = (3 I - Q_k) / 2`,
:math:`Q_{k+1} = Q_k R_k^2`, and two steps are one factor that costs two products instead of six:

.. math::
    R_k R_{k+1} = \tfrac{1}{16} (36 I - 39 Q + 27 Q^2 - 9 Q^3 + Q^4)
                = \tfrac{1}{16} (Z^2 - \tfrac{69}{8} Q + \tfrac{1575}{64} I), \quad
    Z = Q^2 - \tfrac{9}{2} Q + \tfrac{27}{8} I, \quad Q = Q_k .

Five steps take 10 products where the textbook form takes 15; four of them are squares, whose derivative costs one
product instead of two.

The derivative of such a polynomial f at a symmetric matrix is its own adjoint, so the gradient of S is the derivative
of f in the direction of the (symmetric) gradient of f(S). It runs beside the iteration, each matrix carrying its
tangent: nothing but the covariance has to be kept for the backward pass.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .scratch import scratch
from .solvers.covariance import zero_variance

#: buffers that the iteration with tangents ever has in use at one time
_MOST_IN_USE = 14
#: elements of these buffers, so that they stay in the CPU's cache: 4 MiB in float32, 18 matrices of 64 x 64 at a time
_BUFFERED = 1 << 20


class _Matrix(NamedTuple):
    """A batch of symmetric matrices, and its derivative in the wanted direction."""

    value: Tensor
    tangent: Tensor | None


def products(num_iters: int) -> tuple[int, int]:
    """How many g x g products the iteration takes, and how many more its tangents take."""
    values = tangents = 0
    for done in range(0, num_iters, 2):
        two_steps, more, first = done + 2 <= num_iters, done + 2 < num_iters, done == 0
        values += 2 * two_steps + 2 * more + (not first)
        tangents += 2 * two_steps + 3 * more + 2 * (not first)
    return values, tangents


def newton(sigma: Tensor, num_iters: int) -> Tensor:
    """:func:`gw_detectron.layers.newton_inverse_sqrt`, (N, g, g) -> (N, g, g)."""
    whitening = torch.empty_like(sigma)
    inverse_trace = _inverse_trace(sigma)
    for part, inverse, out in _portions(sigma, inverse_trace, whitening):
        matrices = _Algebra(part)
        p = matrices.iterate(_Matrix(torch.mul(part, inverse, out=matrices.new()), None), num_iters)
        torch.mul(p.value, inverse.sqrt(), out=out)
    return whitening


def newton_backward(sigma: Tensor, grad: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """The whitening matrices again, and the symmetric gradient of the covariance, given that of the whitening matrices.

    Source: equal to Group Whitening supplement, Eqs. 5-6.
    """
    whitening, grad_sigma = torch.empty_like(sigma), torch.empty_like(sigma)
    inverse_trace = _inverse_trace(sigma)
    for part, grad_part, inverse, out, grad_out in _portions(sigma, grad, inverse_trace, whitening, grad_sigma):
        matrices = _Algebra(part)
        s = torch.mul(part, inverse, out=matrices.new())
        direction = torch.add(grad_part, grad_part.mT, out=matrices.new()).mul_(0.5 * inverse.sqrt())
        p = matrices.iterate(_Matrix(s, direction), num_iters)
        torch.mul(p.value, inverse.sqrt(), out=out)
        assert p.tangent is not None  # S had one
        # the trace divides S and, under a root, W: both give a multiple of the identity
        of_trace = _inner(p.tangent, s) + 0.5 * _inner(direction, p.value)
        torch.mul(_add_identity(p.tangent, -of_trace), inverse, out=grad_out)
    return whitening, grad_sigma


def _portions(*batches: Tensor) -> Iterator[tuple[Tensor, ...]]:
    first = batches[0]
    size = max(1, _BUFFERED // (_MOST_IN_USE * first.shape[1:].numel())) if first.device.type == "cpu" else len(first)
    return zip(*(batch.split(size) for batch in batches), strict=True)


def _inverse_trace(sigma: Tensor) -> Tensor:
    """1 / tr(sigma) as (N, 1, 1), and 0 where there is no variance."""
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    alive = trace > zero_variance(sigma.dtype)
    return torch.where(alive, trace, torch.ones_like(trace)).reciprocal() * alive


def _add_identity(matrix: Tensor, value: float | Tensor) -> Tensor:
    """Adds a number, or one number of each matrix (N, 1), to the diagonal in place."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(value)
    return matrix


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner products of two batches of matrices, (N, 1)."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))[:, None]


class _Algebra:
    """Products of symmetric matrices that commute, in buffers that are used again."""

    def __init__(self, like: Tensor) -> None:
        self._free = list(scratch("matrices", (_MOST_IN_USE, *like.shape), like))

    def new(self) -> Tensor:
        return self._free.pop()

    def release(self, *matrices: _Matrix) -> None:
        self._free += [buffer for matrix in matrices for buffer in matrix if buffer is not None]

    def iterate(self, s: _Matrix, num_iters: int) -> _Matrix:
        """P after ``num_iters`` steps from S, which is left as it is."""
        p, q, left = None, s, num_iters
        while left:
            steps = min(left, 2)
            left -= steps
            factor = self._two_steps(q) if steps == 2 else self._one_step(q)
            if left:
                square = self._square(factor)
                q, old = self._product(q, square), q
                self.release(square, *([] if old is s else [old]))
            if p is None:
                p = factor
            else:
                p, old = self._product(p, factor), p
                self.release(factor, old)
        return self._identity(s) if p is None else p

    def _identity(self, like: _Matrix) -> _Matrix:
        tangent = None if like.tangent is None else self.new().zero_()
        return _Matrix(_add_identity(self.new().zero_(), 1), tangent)

    def _one_step(self, q: _Matrix) -> _Matrix:
        """R = (3 I - Q) / 2."""
        tangent = None if q.tangent is None else torch.mul(q.tangent, -0.5, out=self.new())
        return _Matrix(_add_identity(torch.mul(q.value, -0.5, out=self.new()), 1.5), tangent)

    def _two_steps(self, q: _Matrix) -> _Matrix:
        """(Z / 4)^2 - 69 / 128 Q + 1575 / 1024 I."""
        z = self._square(q, 1 / 4, q, -9 / 8)
        _add_identity(z.value, 27 / 32)
        factor = self._square(z, 1, q, -69 / 128)
        _add_identity(factor.value, 1575 / 1024)
        self.release(z)
        return factor

    def _product(self, a: _Matrix, b: _Matrix) -> _Matrix:
        tangent = None
        if a.tangent is not None and b.tangent is not None:
            tangent = torch.bmm(a.tangent, b.value, out=self.new()).baddbmm_(a.value, b.tangent)
        return _Matrix(torch.bmm(a.value, b.value, out=self.new()), tangent)

    def _square(self, a: _Matrix, alpha: float = 1, b: _Matrix | None = None, beta: float = 0) -> _Matrix:
        """alpha a^2 + beta b."""
        b = b or a
        value = torch.baddbmm(b.value, a.value, a.value, beta=beta, alpha=alpha, out=self.new())
        tangent = None
        if a.tangent is not None and b.tangent is not None:
            half = torch.baddbmm(b.tangent, a.value, a.tangent, beta=beta / 2, alpha=alpha, out=self.new())
            tangent = torch.add(half, half.mT, out=self.new())
            self._free.append(half)
        return _Matrix(value, tangent)
