r"""Whitening layers in plain PyTorch; nothing here knows Detectron2.

The family is two layers times a table of solvers. :class:`GroupWhitening2d` whitens the groups of channels of a
sample, :class:`BatchWhitening2d` the channels of a group over the batch; a solver (:data:`SOLVERS`) turns either
covariance into a whitening matrix. Which member is which other one:

- BW with one channel per group is BN, with any solver; in evaluation if ``running="covariance"``.
- GW with one group is LayerNorm over the sample, which is GN with one group, with any solver.
- The solver ``standardize`` makes GW GN and BW BN, with any groups.
- GW of a single sample with g = C is BW of it with k = C.
- ``newton`` is ``zca`` up to a factor on white input: :math:`\psi(\sigma^2 I) = f I / \sigma` with
  :math:`f = p_T(1/g) / \sqrt{g}`, p_0 = 1, p_k(s) = (3 p_{k-1} - p_{k-1}^3 s) / 2. f is 1 for g = 1, which is why the
  first two hold for it, and 0.766 for g = 64 and T = 5.
- ``pca`` is a rotation of ``zca``; ``zca_max`` with threshold 0 and ``zca_entropy`` of equal eigenvalues are ``zca``.
- Uncorrelated channels are standardised by ``zca``, ``cholesky`` and these with ``corr``.
- ``pivoted_cholesky`` is ``cholesky`` where variances descend; eps means something else to it, so that it is BN, LN or
  GN with eps 0 only.
"""

from ..ops.batch_whitening.reference import batch_whiten
from ..ops.group_whitening.op import group_whiten, use_path
from ..ops.solvers import SOLVERS, Solver, newton_inverse_sqrt, zca_inverse_sqrt
from .batch_whitening import ROTATIONS, RUNNING, BatchWhitening2d, FrozenBatchWhitening2d
from .group_whitening import GroupWhitening2d

__all__ = [
    "ROTATIONS",
    "RUNNING",
    "SOLVERS",
    "BatchWhitening2d",
    "FrozenBatchWhitening2d",
    "GroupWhitening2d",
    "Solver",
    "batch_whiten",
    "group_whiten",
    "newton_inverse_sqrt",
    "use_path",
    "zca_inverse_sqrt",
]
