"""Whitening matrices of covariance matrices, each solver with a backward pass that stays finite.

Shape shorthand: ``g`` is the side of a covariance matrix, ``...`` any number of batch dimensions.

A covariance that is zero (a constant sample and no ``eps``) has no inverse square root. The solvers take the
pseudo-inverse there, a zero matrix, so that the whitened output and its gradient are zero instead of NaN.
"""

from .cholesky import cholesky_whitening, pivoted_cholesky_whitening
from .covariance import NonFiniteCovarianceError
from .eigen import pca_inverse_sqrt, zca_entropy_inverse_sqrt, zca_inverse_sqrt, zca_max_inverse_sqrt
from .newton import newton_inverse_sqrt
from .solver import DEFAULT_SOLVER, READ_BY, SOLVERS, Solver, standardizing

__all__ = [
    "DEFAULT_SOLVER",
    "READ_BY",
    "SOLVERS",
    "NonFiniteCovarianceError",
    "Solver",
    "cholesky_whitening",
    "newton_inverse_sqrt",
    "pca_inverse_sqrt",
    "pivoted_cholesky_whitening",
    "standardizing",
    "zca_entropy_inverse_sqrt",
    "zca_inverse_sqrt",
    "zca_max_inverse_sqrt",
]
