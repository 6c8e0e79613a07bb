r"""The equations of batch whitening in plain torch.

Shapes: ``N`` samples, ``C`` channels, ``k`` channels per group, ``r = C mod k`` channels of a
smaller last group, ``m = N * prod(spatial)`` columns, over which the covariance of each group is
computed.

The matrices of all groups are stored as one tensor of rows, (C, k): row i belongs to channel i and
holds the k numbers of its group's matrix. A smaller last group of r channels uses the first r of
them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .arguments import check_integer, check_tensors
from .matrices import scale_rows
from .numerics import autocast_off, compute_dtype, memory_format_of
from .solvers import DEFAULT_SOLVER, Solver, check_solver


def batch_whiten(
    x: Tensor,
    channels_per_group: int = 64,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    solver: Solver = DEFAULT_SOLVER,
    sync: bool = False,
) -> Tensor:
    r"""Whiten channel groups by their covariance over batch and space.

    .. math::
        \mu = \tfrac{1}{m} X \mathbf{1}, \quad X_C = X - \mu \mathbf{1}^T, \quad
        \Sigma = \tfrac{1}{m} X_C X_C^T + \epsilon I, \quad y = \gamma \, \psi(\Sigma) X_C + \beta

    for the columns :math:`X \in \mathbb{R}^{k \times m}` of each group. Every position of every
    sample is a column, as in BN. A batch without variance gives ``bias``.

    The other arguments, the returned tensor and the errors are as in
    :func:`gw_detectron.layers.group_whiten`.

    Args:
        channels_per_group: k, capped at C; contiguous channels form a group, the last of which may
            be smaller.
        sync: compute the statistics over all processes of a distributed run, also if ``x`` is empty.

    Source: Decorrelated Batch Normalization, Eq. 3 and Algorithm 1; On Batch Orthogonalization
        Layers, Eqs. 3 and 5.
    """
    check_solver(solver)
    check_tensors(x, weight, bias)
    width = effective_width(x.shape[1], channels_per_group)

    with autocast_off(x.device.type):
        batch = batch_statistics(to_columns(x), width, sync)
        matrices = [solver(covariance) for covariance in batch.covariances]
        return transform(batch.centered, matrices, weight, bias, like=x)


def effective_width(num_channels: int, channels_per_group: int) -> int:
    """Return the channels per group k, capped at the channel count.

    Raise ValueError unless both are positive.
    """
    check_integer("channels_per_group", channels_per_group, least=1, example=64)
    check_integer("num_channels", num_channels, least=1, example=64)
    return min(channels_per_group, num_channels)


def to_columns(x: Tensor) -> Tensor:
    """Reshape (N, C, *spatial) to (C, m) in the compute dtype."""
    return x.to(compute_dtype(x)).movedim(1, 0).flatten(1)


class BatchStatistics(NamedTuple):
    """Statistics of a batch; the lists have the groups of channels, see :func:`split`."""

    #: m, the number of columns in all processes, a scalar without gradient
    columns: Tensor
    #: (C,)
    mean: Tensor
    #: the columns of this process minus the mean: (C // k, k, m_p) and perhaps (1, r, m_p)
    centered: list[Tensor]
    #: divided by m: (C // k, k, k) and perhaps (1, r, r)
    covariances: list[Tensor]


def batch_statistics(
    columns: Tensor, width: int, sync: bool = False
) -> BatchStatistics:
    """Compute mean and covariance of columns (C, m_p), in groups of ``width`` channels.

    With ``sync`` they are those of all processes, which may have different m_p, also 0. Each of
    them must call this, and run the backward pass. Two all-reduces: a single one of second moments
    about zero would cancel digits if the mean is large.
    """
    synchronized = sync and _are_many_processes()

    count = columns.new_full((1,), columns.shape[1])
    total = columns.sum(1)
    if synchronized:
        sums = _SumOverProcesses.apply(torch.cat((count, total)))
        count = sums[:1].detach()
        total = sums[1:]

    divisor = count.clamp_min(1)
    mean = total / divisor
    centered = split(columns - mean[:, None], width)

    products = [part @ part.mT for part in centered]
    if synchronized:
        products = _summed_over_processes(products)
    covariances = [product / divisor for product in products]

    return BatchStatistics(count[0], mean, centered, covariances)


def _are_many_processes() -> bool:
    if not dist.is_available() or not dist.is_initialized():
        return False
    return dist.get_world_size() > 1


def _summed_over_processes(tensors: list[Tensor]) -> list[Tensor]:
    """Sum tensors over all processes in a single all-reduce."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sums = _SumOverProcesses.apply(flat).split(sizes)
    return list(map(Tensor.view_as, sums, tensors))


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


def transform(
    centered: list[Tensor],
    matrices: list[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    like: Tensor,
) -> Tensor:
    r"""Return :math:`\gamma A X_C + \beta` in the layout of ``like``, the input, for A = ``matrices``."""
    dtype = matrices[0].dtype
    width = matrices[0].shape[-1]

    if weight is not None:
        # folds the scale into the small matrices: one pass less over the columns
        scales = split(weight.to(dtype), width)
        matrices = list(map(scale_rows, matrices, scales))

    if bias is None:
        parts = list(map(torch.matmul, matrices, centered))
    else:
        shifts = split(bias.to(dtype)[:, None], width)
        parts = list(map(torch.baddbmm, shifts, matrices, centered))

    channels_first = like.movedim(1, 0).shape
    y = join(parts).reshape(channels_first).movedim(0, 1)
    return y.to(like.dtype).contiguous(memory_format=memory_format_of(like))


def split(rows: Tensor, width: int) -> list[Tensor]:
    """Split channels into groups, as views: (C, ...) -> (C // k, k, ...) and, if r > 0, (1, r, ...)."""
    channels = len(rows)
    whole = channels // width * width
    groups = rows[:whole].unflatten(0, (-1, width))
    if whole == channels:
        return [groups]

    last = rows[whole:]
    return [groups, last.unsqueeze(0)]


def join(parts: Iterable[Tensor]) -> Tensor:
    """Invert :func:`split`."""
    rows = [part.flatten(0, 1) for part in parts]
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows)


def split_matrices(rows: Tensor) -> list[Tensor]:
    """Return the matrices of all groups: (C, k) -> (C // k, k, k) and, if r > 0, (1, r, r)."""
    matrices = []
    for part in split(rows, rows.shape[1]):
        side = part.shape[1]
        matrices.append(part[..., :side])
    return matrices


def join_matrices(matrices: Iterable[Tensor], width: int) -> Tensor:
    """Invert :func:`split_matrices`; unused elements are zero."""
    rows = []
    for matrix in matrices:
        unused = width - matrix.shape[-1]
        rows.append(F.pad(matrix, (0, unused)))
    return join(rows)
