r"""Mean and covariance of channels over a batch, or over all processes.

.. math::
    m = \sum_p m_p, \quad \mu = \tfrac{1}{m} \sum_p X_p \mathbf{1}, \quad
    \Sigma = \tfrac{1}{m} \sum_p (X_p - \mu \mathbf{1}^T) (X_p - \mu \mathbf{1}^T)^T

Two all-reduces: the sums for the mean, then the centered second moments. A single all-reduce of second moments about
zero would cancel digits if the mean is large.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .channel_groups import split


class BatchStatistics(NamedTuple):
    """Statistics of a batch.

    Args:
        columns: m, the number of columns in all processes, a scalar without gradient.
        mean: (C,).
        centered: the columns of this process minus the mean, by groups of channels: (C // k, k, m_p) and, if the last
            group is smaller, (1, r, m_p).
        covariances: by groups, divided by m: (C // k, k, k) and, if the last group is smaller, (1, r, r).
    """

    columns: Tensor
    mean: Tensor
    centered: list[Tensor]
    covariances: list[Tensor]


def batch_statistics(columns: Tensor, width: int, sync: bool = False) -> BatchStatistics:
    """Compute the statistics of a batch.

    Args:
        columns: (C, m_p), float32 or float64. Processes may have different m_p, also 0.
        width: k, channels of a group.
        sync: over all processes of the default group. Each of them must call this, and run the backward pass.

    Returns:
        The statistics, differentiable except ``columns``.
    """
    synchronized = sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    count = columns.new_full((1,), columns.shape[1])
    total = columns.sum(1)
    if synchronized:
        sums = _SumOverProcesses.apply(torch.cat((count, total)))
        count, total = sums[:1].detach(), sums[1:]
    divisor = count.clamp_min(1)
    mean = total / divisor
    centered = split(columns - mean[:, None], width)
    products = [part @ part.mT for part in centered]
    if synchronized:
        sums = _SumOverProcesses.apply(torch.cat([product.flatten() for product in products]))
        pieces = sums.split([product.numel() for product in products])
        products = [piece.view_as(product) for piece, product in zip(pieces, products, strict=True)]
    return BatchStatistics(count[0], mean, centered, [product / divisor for product in products])


class _SumOverProcesses(torch.autograd.Function):
    """Sum a tensor over all processes; the backward pass sums the gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOverProcesses.apply(grad)
