"""Whitening layers for PyTorch, and the layers they are compared with; they import torch only.

Two layers share a table of solvers. :class:`GroupWhitening2d` (GW) whitens the channel groups of each sample.
:class:`BatchWhitening2d` (BW) whitens the channels of each group over the batch. A solver (:data:`SOLVERS`) computes
the whitening matrix from the covariance in both. docs/whitening.md lists the settings that equal BN, GN and LayerNorm.
"""

from ..ops.batch_whitening import batch_whiten
from ..ops.group_whitening.op import group_whiten, use_backend
from ..ops.solvers import SOLVERS, Solver, newton_inverse_sqrt, zca_inverse_sqrt
from .batch_renorm import BatchRenorm2d
from .batch_whitening import BatchWhitening2d, FrozenBatchWhitening2d
from .group_whitening import GroupWhitening2d
from .measured_statistics import adapt_statistics, match_scales, measure_statistics
from .mixed_norms import MixedBatchNorm2d, MixedWhitening2d
from .shared_statistics import ImageStatistics
from .weight_standardization import (
    WeightStandardized,
    standardize_weight,
    standardize_weights,
)

__all__ = [
    "SOLVERS",
    "BatchRenorm2d",
    "BatchWhitening2d",
    "FrozenBatchWhitening2d",
    "GroupWhitening2d",
    "ImageStatistics",
    "MixedBatchNorm2d",
    "MixedWhitening2d",
    "Solver",
    "WeightStandardized",
    "adapt_statistics",
    "batch_whiten",
    "group_whiten",
    "match_scales",
    "measure_statistics",
    "newton_inverse_sqrt",
    "standardize_weight",
    "standardize_weights",
    "use_backend",
    "zca_inverse_sqrt",
]
