"""``Solver``, a solver with its options, and the registry ``SOLVERS``."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_flag, check_integer, check_number
from ..matrices import (
    diagonal_values,
    identity_like,
    inverse_root,
    scale_columns,
    scale_rows,
)
from ..numerics import zero_variance_threshold
from .cholesky import cholesky_whitening, pivoted_cholesky_whitening
from .eigen import (
    pca_inverse_sqrt,
    zca_entropy_inverse_sqrt,
    zca_inverse_sqrt,
    zca_max_inverse_sqrt,
)
from .newton import newton_inverse_sqrt

#: option -> the only solver that reads it
OPTION_SOLVER = {"num_iters": "newton", "threshold": "zca_max"}
#: the published c of zca_max
_THRESHOLD = 0.01


@dataclass(frozen=True)
class Solver:
    r"""Compute whitening matrices from covariance matrices.

    .. math:: W = \psi(\Sigma + \epsilon I)

    With ``corr`` the channels are standardized first, then their correlation matrix is whitened,

    .. math::
        W = \psi(D_\sigma^{-1/2} \Sigma D_\sigma^{-1/2}) \, D_\sigma^{-1/2}, \quad D_\sigma = \mathrm{diag}(\Sigma)

    Args:
        name: a key of :data:`gw_detectron.layers.SOLVERS`.
        num_iters: steps T of ``newton``.
        eps: added to the diagonal of the covariance, in units of the input's variance.
            ``pivoted_cholesky`` adds nothing and replaces smaller pivots by ``eps``.
        threshold: c of ``zca_max``.
        corr: whiten the correlation matrix.

    Raises ValueError or TypeError for an option that is wrong or belongs to another solver.

    Source: Group Whitening, Eqs. 5-7; On Batch Orthogonalization Layers, Table I, sections IV to
        VI-A, Eq. 12.
    """

    name: str = "newton"
    num_iters: int = 5
    eps: float = 1e-5
    threshold: float = _THRESHOLD
    corr: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in SOLVERS:
            raise ValueError(
                f"solver ({self.name!r}): unknown solver. Fix: choose one of {sorted(SOLVERS)}."
            )

        check_integer("num_iters", self.num_iters, least=0, example=5, most=1000)
        check_number("eps", self.eps, least=0, example=1e-5)
        check_number("threshold", self.threshold, least=0, most=1, example=_THRESHOLD)
        check_flag("corr", self.corr)

        reader = OPTION_SOLVER["threshold"]
        if self.threshold != _THRESHOLD and self.name != reader:
            raise ValueError(
                f"threshold ({self.threshold}): the solver {self.name!r} does not read it. "
                f"Fix: leave it out, or pass solver={reader!r}."
            )

    def __call__(self, covariance: Tensor) -> Tensor:
        """Return the whitening matrices of covariance matrices without eps, both (..., g, g).

        NaN or infinity in the input of a solver that uses eigendecomposition is a NonFiniteError.
        """
        sigma = covariance
        if self.added_eps:
            sigma = sigma + self.added_eps * identity_like(sigma)
        solve = SOLVERS[self.name]
        if not self.corr:
            return solve(sigma, self, self.eps)

        inverse_std = _inverse_std(sigma)
        correlation = scale_columns(scale_rows(sigma, inverse_std), inverse_std)
        # ones on the diagonal exactly: rounding there would decide which pivot comes first
        has_variance = inverse_std > 0
        ones = torch.diag_embed(has_variance.to(sigma.dtype))
        correlation = correlation.tril(-1) + correlation.triu(1) + ones

        inverse_variance = inverse_std.detach().square()
        least = self.eps * inverse_variance.amin(-1, keepdim=True)
        matrices = solve(correlation, self, least)
        return scale_columns(matrices, inverse_std)

    @property
    def added_eps(self) -> float:
        """What is added to the diagonal of the covariance."""
        return 0.0 if self.name == "pivoted_cholesky" else self.eps

    def layer_arguments(self) -> dict[str, Any]:
        """Return the arguments with which a whitening layer makes this solver."""
        options = dataclasses.asdict(self)
        return {"solver": options.pop("name"), **options}

    def __str__(self) -> str:
        text = f"eps={self.eps:g}, solver={self.name}"
        if self.name == OPTION_SOLVER["num_iters"]:
            text = f"iters={self.num_iters}, {text}"
        if self.threshold != _THRESHOLD:
            text += f", threshold={self.threshold:g}"
        if self.corr:
            text += ", corr=true"
        return text


def check_solver(solver: Any) -> None:
    """Raise TypeError unless ``solver`` is a Solver."""
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver ({solver!r}): expected a Solver. Fix: pass one, e.g. Solver('zca')."
        )


def _inverse_std(sigma: Tensor) -> Tensor:
    r"""Return the diagonal of :math:`D_\sigma^{-1/2}`, 0 for a channel without variance.

    As the whitening matrix it makes batch whitening BN and Group Whitening GN (Group Whitening, Eqs. 1 and 4).
    """
    variance = diagonal_values(sigma)
    return inverse_root(variance, variance > zero_variance_threshold(sigma.dtype))


#: name -> function of covariance matrices (..., g, g), which include eps, the options, and the least
#: eigenvalue that this eps leaves, a number or (..., 1)
SOLVERS: dict[str, Callable[[Tensor, Solver, float | Tensor], Tensor]] = {
    "newton": lambda sigma, options, least: newton_inverse_sqrt(
        sigma, options.num_iters
    ),
    "zca": lambda sigma, options, least: zca_inverse_sqrt(sigma, least=least),
    "zca_max": lambda sigma, options, least: zca_max_inverse_sqrt(
        sigma, options.threshold, options.eps, least=least
    ),
    "zca_entropy": lambda sigma, options, least: zca_entropy_inverse_sqrt(
        sigma, options.eps, least=least
    ),
    "pca": lambda sigma, options, least: pca_inverse_sqrt(sigma, least=least),
    "cholesky": lambda sigma, options, least: cholesky_whitening(sigma, least=least),
    "pivoted_cholesky": lambda sigma, options, least: pivoted_cholesky_whitening(
        sigma, options.eps
    ),
    "standardize": lambda sigma, options, least: torch.diag_embed(_inverse_std(sigma)),
}

#: the published setting of Group Whitening
DEFAULT_SOLVER = Solver()
