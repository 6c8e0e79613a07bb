"""A solver by its name with its options, and the table of all of them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cholesky import cholesky_whitening, pivoted_cholesky_whitening
from .covariance import zero_variance
from .eigen import pca_inverse_sqrt, zca_entropy_inverse_sqrt, zca_inverse_sqrt, zca_max_inverse_sqrt
from .newton import newton_inverse_sqrt

#: the options that one solver alone reads, by their names in :class:`Solver`
READ_BY = {"num_iters": "newton", "threshold": "zca_max"}
#: the published c of zca_max
_THRESHOLD = 0.01


@dataclass(frozen=True)
class Solver:
    r"""A way from covariance matrices to whitening matrices.

    With ``corr`` the channels are standardised first and their correlation matrix is decorrelated,

    .. math::
        W = \psi(D_\sigma^{-1/2} \Sigma D_\sigma^{-1/2}) \, D_\sigma^{-1/2}, \quad D_\sigma = \mathrm{diag}(\Sigma)

    Args:
        name: a key of :data:`SOLVERS`.
        num_iters: steps T of ``newton``.
        eps: added to the diagonal of the covariance, in units of the input's variance; ``pivoted_cholesky`` adds
            nothing and replaces smaller pivots by it.
        threshold: c of ``zca_max``.
        corr: whiten the correlation matrix, after standardising.

    Raises:
        ValueError: an option is out of its range or belongs to another solver.

    Source: Group Whitening, Eqs. 5-7; On Batch Orthogonalization Layers, Table I, sections IV to VI-A, Eq. 12.
    """

    name: str = "newton"
    num_iters: int = 5
    eps: float = 1e-5
    threshold: float = _THRESHOLD
    corr: bool = False

    def __post_init__(self) -> None:
        if self.name not in SOLVERS:
            raise ValueError(f"unknown whitening solver {self.name!r}; allowed are {sorted(SOLVERS)}")
        if not isinstance(self.num_iters, int) or self.num_iters < 0:
            raise ValueError(
                f"num_iters={self.num_iters!r} must be zero or a positive integer; the published value is 5"
            )
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps={self.eps} must be zero or a positive number; the published value is 1e-5")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be a number from 0 to 1; the published value is 0.01")
        if self.threshold != _THRESHOLD and self.name != READ_BY["threshold"]:
            raise ValueError(
                f"threshold={self.threshold} belongs to the solver {READ_BY['threshold']}, not to {self.name}"
            )

    def __call__(self, covariance: Tensor) -> Tensor:
        """Returns whitening matrices.

        Args:
            covariance: symmetric positive semi-definite matrices without eps, (..., g, g).

        Returns:
            W, (..., g, g).

        Raises:
            NonFiniteCovarianceError: a solver by eigendecomposition meets NaN or infinity.
        """
        sigma = covariance
        if self.eps and self.name != "pivoted_cholesky":
            sigma = sigma + self.eps * torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
        solve = SOLVERS[self.name]
        if not self.corr:
            return solve(sigma, self)
        inverse_std = _inverse_std(sigma)
        correlation = inverse_std[..., :, None] * sigma * inverse_std[..., None, :]
        # a channel's correlation with itself is 1, not 1 up to rounding, by which a pivot would be chosen
        ones = torch.diag_embed((inverse_std > 0).to(sigma.dtype))
        correlation = correlation.tril(-1) + correlation.triu(1) + ones
        return solve(correlation, self) * inverse_std[..., None, :]

    def layer_arguments(self) -> dict[str, Any]:
        """Return the arguments with which a whitening layer makes this solver."""
        options = dataclasses.asdict(self)
        return {"solver": options.pop("name"), **options}

    def __str__(self) -> str:
        text = f"eps={self.eps:g}, solver={self.name}"
        if self.name == READ_BY["num_iters"]:
            text = f"iters={self.num_iters}, {text}"
        if self.threshold != _THRESHOLD:
            text += f", threshold={self.threshold:g}"
        return text + (", corr=true" if self.corr else "")


def standardizing(sigma: Tensor) -> Tensor:
    r""":math:`D_\sigma^{-1/2}`, which standardises each channel and decorrelates none: BN's and GN's own matrix.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).

    Returns:
        Diagonal matrices, (..., g, g); 0 for a channel without variance.

    Source: On Batch Orthogonalization Layers, Table I, row BN; Group Whitening, Eqs. 1 and 4.
    """
    return torch.diag_embed(_inverse_std(sigma))


def _inverse_std(sigma: Tensor) -> Tensor:
    variance = sigma.diagonal(dim1=-2, dim2=-1)
    alive = variance > zero_variance(sigma.dtype)
    return torch.where(alive, torch.where(alive, variance, 1.0).rsqrt(), 0.0)


#: name -> the function that whitens covariance matrices (..., g, g) by the options it needs
SOLVERS: dict[str, Callable[[Tensor, Solver], Tensor]] = {
    "newton": lambda sigma, options: newton_inverse_sqrt(sigma, options.num_iters),
    "zca": lambda sigma, options: zca_inverse_sqrt(sigma),
    "zca_max": lambda sigma, options: zca_max_inverse_sqrt(sigma, options.threshold, options.eps),
    "zca_entropy": lambda sigma, options: zca_entropy_inverse_sqrt(sigma, options.eps),
    "pca": lambda sigma, options: pca_inverse_sqrt(sigma),
    "cholesky": lambda sigma, options: cholesky_whitening(sigma),
    "pivoted_cholesky": lambda sigma, options: pivoted_cholesky_whitening(sigma, options.eps),
    "standardize": lambda sigma, options: standardizing(sigma),
}

#: the published setting of Group Whitening
DEFAULT_SOLVER = Solver()
