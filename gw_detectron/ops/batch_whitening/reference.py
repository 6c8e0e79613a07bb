"""The equations of batch whitening in plain torch.

Shapes: ``N`` samples, ``C`` channels, ``k`` channels per group, ``m = N * prod(spatial)`` columns, over which the
covariance of each group is computed.
"""

import torch
from torch import Tensor

from ..checks import autocast_off, check_tensors, compute_dtype, memory_format_of
from ..solvers import DEFAULT_SOLVER, Solver, check_solver
from .channel_groups import effective_width, join, split
from .statistics import batch_statistics


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

    for the columns :math:`X \in \mathbb{R}^{k \times m}` of each group. Every position of every sample is a column, as
    in BN. Statistics and solver run in float32 (float64 for float64 input), also under autocast. A batch without
    variance gives ``bias``.

    One channel per group is BN with any solver: the iteration of ``newton`` starts at its fixed point there.

    Args:
        x: floating point, (N, C, *spatial) with any number of spatial dimensions, in any memory format.
        channels_per_group: k, capped at C; contiguous channels form a group, the last of which may be smaller.
        weight: per-channel scale :math:`\gamma`, (C,).
        bias: per-channel shift :math:`\beta`, (C,).
        solver: covariance -> whitening matrix, :math:`\psi`.
        sync: compute the statistics over all processes of a distributed run.

    Returns:
        y in the shape, dtype and memory format of ``x``. For an empty ``x`` y is empty and still depends on ``weight``
        and ``bias``, and on the statistics of other processes.

    Raises:
        ValueError: wrong rank or dtype of ``x``, ``channels_per_group`` out of its range, or affine parameters of
            another shape than (C,).
        TypeError: ``solver`` is not a Solver.
        NonFiniteCovarianceError: NaN or infinity in the input of a solver that uses eigendecomposition.

    Source: Decorrelated Batch Normalization, Eq. 3 and Algorithm 1; On Batch Orthogonalization Layers, Eqs. 3 and 5.
    """
    check_solver(solver)
    check_tensors(x, weight, bias)
    width = effective_width(x.shape[1], channels_per_group)
    with autocast_off(x.device.type):
        batch = batch_statistics(to_columns(x), width, sync)
        matrices = [solver(covariance) for covariance in batch.covariances]
        return transform(batch.centered, matrices, weight, bias, like=x)


def to_columns(x: Tensor) -> Tensor:
    """Reshape (N, C, *spatial) to (C, m) in the compute dtype."""
    return x.to(compute_dtype(x)).movedim(1, 0).flatten(1)


def transform(
    centered: list[Tensor], matrices: list[Tensor], weight: Tensor | None, bias: Tensor | None, *, like: Tensor
) -> Tensor:
    r"""Return :math:`\gamma A X_C + \beta` in the layout of ``like``.

    Args:
        centered: X_C by groups, (C // k, k, m) and, if the last group is smaller, (1, r, m).
        matrices: A by groups, (C // k, k, k) and, if the last group is smaller, (1, r, r).
        weight: :math:`\gamma`, (C,).
        bias: :math:`\beta`, (C,).
        like: the input, (N, C, *spatial), which gives shape, dtype and memory format.
    """
    dtype, width = matrices[0].dtype, matrices[0].shape[-1]
    if weight is not None:  # fold the scale into the small matrices: one pass less over the columns
        scales = split(weight.to(dtype), width)
        matrices = [scale[..., None] * matrix for scale, matrix in zip(scales, matrices, strict=True)]
    if bias is None:
        parts = [matrix @ part for matrix, part in zip(matrices, centered, strict=True)]
    else:
        shifts = split(bias.to(dtype), width)
        parts = [
            torch.baddbmm(shift[..., None], matrix, part)
            for shift, matrix, part in zip(shifts, matrices, centered, strict=True)
        ]
    channels_first = like.movedim(1, 0).shape
    y = join(parts).reshape(channels_first).movedim(0, 1)
    return y.to(like.dtype).contiguous(memory_format=memory_format_of(like))
