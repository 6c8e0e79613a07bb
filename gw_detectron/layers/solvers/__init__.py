"""Whitening matrices of covariance matrices, each solver with a backward pass that stays finite.

Shape shorthand: ``g`` is the side of a covariance matrix, ``...`` any number of batch dimensions.

A covariance that is zero (a constant sample and no ``eps``) has no inverse square root. The solvers take the
pseudo-inverse there, a zero matrix, so that the whitened output and its gradient are zero instead of NaN.
"""

from collections.abc import Callable

from torch import Tensor

from .covariance import NonFiniteCovarianceError
from .eigen import zca_inverse_sqrt
from .newton import newton_inverse_sqrt

__all__ = ["SOLVERS", "NonFiniteCovarianceError", "newton_inverse_sqrt", "zca_inverse_sqrt"]

#: name -> ``solver(sigma, num_iters)``; an exact solver has no use for ``num_iters``
SOLVERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "newton": newton_inverse_sqrt,
    "zca": lambda sigma, num_iters: zca_inverse_sqrt(sigma),
}
