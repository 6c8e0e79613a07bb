"""What every solver must know of a covariance matrix: when it is zero, and when it is no matrix of numbers."""

import torch


class NonFiniteCovarianceError(FloatingPointError, ValueError):
    """A covariance matrix holds NaN or infinity, so it has no eigenvalues."""


def zero_variance(dtype: torch.dtype) -> float:
    """Variance up to this counts as zero: the backward pass holds variance^(-3/2), which must stay in range."""
    return torch.finfo(dtype).tiny ** 0.5
