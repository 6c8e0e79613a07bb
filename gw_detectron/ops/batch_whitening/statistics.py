r"""Mean and covariance of channels over a batch, in one process or over all processes of a distributed run.

.. math::
    m = \sum_p m_p, \quad \mu = \tfrac{1}{m} \sum_p X_p \mathbf{1}, \quad
    \Sigma = \tfrac{1}{m} \sum_p (X_p - \mu \mathbf{1}^T) (X_p - \mu \mathbf{1}^T)^T

Processes p take two sums, one after the other. A single one, of second moments about zero, would lose the digits that
the mean takes.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .channel_groups import split


class BatchStatistics(NamedTuple):
    """What a batch says about its channels.

    Args:
        columns: m, their number in all processes, a scalar without gradient.
        mean: (C,).
        centred: the columns of this process minus the mean, by groups of channels: (C // k, k, m_p) and perhaps a
            smaller last group.
        covariances: of the groups, (C // k, k, k) and perhaps that of the last, divided by m.
    """

    columns: Tensor
    mean: Tensor
    centred: list[Tensor]
    covariances: list[Tensor]


def batch_statistics(columns: Tensor, width: int, sync: bool = False) -> BatchStatistics:
    """Takes the statistics of a batch; processes may have different numbers of columns, or none.

    Args:
        columns: (C, m_p), float32 or float64.
        width: k, channels of a group.
        sync: over all processes of the default group. All of them have to call, in the backward pass too.
    """
    together = sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    count = columns.new_full((1,), columns.shape[1])
    total = columns.sum(1)
    if together:
        sums = _SumOverProcesses.apply(torch.cat((count, total)))
        count, total = sums[:1].detach(), sums[1:]
    divisor = count.clamp_min(1)
    mean = total / divisor
    centred = split(columns - mean[:, None], width)
    products = [part @ part.mT for part in centred]
    if together:
        sums = _SumOverProcesses.apply(torch.cat([product.flatten() for product in products]))
        pieces = sums.split([product.numel() for product in products])
        products = [piece.view_as(product) for piece, product in zip(pieces, products, strict=True)]
    return BatchStatistics(count[0], mean, centred, [product / divisor for product in products])


class _SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes; a gradient of one is summed over all likewise."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOverProcesses.apply(grad)
