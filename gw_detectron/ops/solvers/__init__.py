"""Solvers: covariance matrix -> whitening matrix, with finite gradients.

CONTRIBUTING.md says how to add one.

Shapes: ``g`` is the side of a covariance matrix, ``...`` any number of batch dimensions.

A zero covariance (a constant sample and ``eps=0``) has no inverse square root. Its whitening matrix is zero, the
pseudo-inverse, so the whitened output and its gradient are zero instead of NaN.
"""

from .eigen import zca_inverse_sqrt
from .newton import newton_inverse_sqrt
from .solver import DEFAULT_SOLVER, OPTION_SOLVER, SOLVERS, Solver, check_solver

__all__ = [
    "DEFAULT_SOLVER",
    "OPTION_SOLVER",
    "SOLVERS",
    "Solver",
    "check_solver",
    "newton_inverse_sqrt",
    "zca_inverse_sqrt",
]
