r"""Whitening layers for PyTorch, and the layers they are compared with; they import torch only.

Two layers share a table of solvers. :class:`GroupWhitening2d` (GW) whitens the channel groups of each sample.
:class:`BatchWhitening2d` (BW) whitens the channels of each group over the batch. A solver (:data:`SOLVERS`) computes
the whitening matrix from the covariance in both. Special cases:

- BW with one channel per group equals BN, for every solver; in evaluation mode only with ``running="covariance"``.
- GW with one group equals LayerNorm over the sample, i.e. GN with one group, for every solver.
- With the solver ``standardize`` GW equals GN and BW equals BN, for all group sizes.
- For a single sample, GW with g = C equals BW with k = C.
- ``newton`` equals ``zca`` up to a factor if the input is already white: :math:`\psi(\sigma^2 I) = f I / \sigma` with
  :math:`f = p_T(1/g) / \sqrt{g}`, p_0 = 1, p_k(s) = (3 p_{k-1} - p_{k-1}^3 s) / 2. For g = 1 the factor is 1, hence the
  first two identities hold for ``newton``; for g = 64 and T = 5 it is 0.766.
- ``pca`` is a rotation of ``zca``. ``zca_max`` with threshold 0, and ``zca_entropy`` of equal eigenvalues, equal
  ``zca``.
- If channels are uncorrelated, ``zca`` and ``cholesky`` only standardize them, also with ``corr``.
- ``pivoted_cholesky`` equals ``cholesky`` if the variances descend. It uses eps as a lower bound, so the identities
  with BN, LayerNorm and GN hold for eps = 0 only.
"""

from ..ops.batch_whitening import batch_whiten
from ..ops.group_whitening.op import group_whiten, use_backend
from ..ops.solvers import SOLVERS, Solver, newton_inverse_sqrt, zca_inverse_sqrt
from .batch_renorm import BatchRenorm2d
from .batch_whitening import BatchWhitening2d, FrozenBatchWhitening2d
from .group_whitening import GroupWhitening2d
from .shared_statistics import ImageStatistics
from .weight_standardization import WeightStandardized, standardize_weight, standardize_weights

__all__ = [
    "SOLVERS",
    "BatchRenorm2d",
    "BatchWhitening2d",
    "FrozenBatchWhitening2d",
    "GroupWhitening2d",
    "ImageStatistics",
    "Solver",
    "WeightStandardized",
    "batch_whiten",
    "group_whiten",
    "newton_inverse_sqrt",
    "standardize_weight",
    "standardize_weights",
    "use_backend",
    "zca_inverse_sqrt",
]
