"""Means and covariances: per split of the columns, then merged."""

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

from torch import Tensor

from . import launch_args as launch
from .compiler import constexpr, jit, tl, triton
from .tiles import sample_ptr, store_matrix, tile_columns, tile_offsets


@jit
def _moments(
    x_ptr, x_n, x_outer, count_ptr, shift_ptr, offset_ptr, moment_ptr, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute count, mean and centered second moments of one split.

    The mean is the sum of shift and offset.
    """
    n, index = tl.program_id(0), tl.program_id(1)
    first = index * per_split
    x_ptr = sample_ptr(x_ptr, n, x_n, VECTOR)
    rows = tl.arange(0, ROWS)
    # Second moments about a value near the mean do not cancel. The mean of the first tile is such a value, even if the
    # first column is an outlier. It is computed as a distance from that column, which is exact for constant rows.
    j, p, exists = tile_columns(first, positions, CPG, JB, PB, VECTOR, X_J)
    present = (rows < GROUPS)[:, None] & exists[None, :]
    start = tl.load(x_ptr + tile_offsets(rows, j, p, x_outer, CPG, VECTOR, X_J), mask=present, other=0.0)
    start = start.to(tl.float32)
    column = tl.sum(tl.where((tl.arange(0, JB * PB) == 0)[None, :], start, 0.0), 1)
    distance = tl.where(present, start - column[:, None], 0.0)
    shift = column + tl.sum(distance, 1) / tl.sum(exists.to(tl.float32), 0)
    total = tl.zeros([ROWS, JB * PB], tl.float32)
    moment = tl.zeros([ROWS, ROWS], tl.float32)
    cross = tl.zeros([ROWS, ROWS], tl.float32)
    count = tl.zeros([JB * PB], tl.float32)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = tile_columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        x = tl.load(x_ptr + tile_offsets(rows, j, p, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
        x = tl.where(inside, x.to(tl.float32) - shift[:, None], 0.0)
        count += exists.to(tl.float32)
        total += x
        if PRECISION == "tf32x3":  # x = high + low; a symmetric result needs only two of the three products
            high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            moment = tl.dot(high, tl.trans(high), moment, input_precision="tf32")
            cross = tl.dot(high, tl.trans(x - high), cross, input_precision="tf32")
        else:
            moment = tl.dot(x, tl.trans(x), moment, input_precision=PRECISION)
    columns = tl.sum(count, 0)
    offset = tl.sum(total, 1) / columns  # of the mean, relative to the shift
    part = n.to(tl.int64) * tl.num_programs(1) + index
    tl.store(count_ptr + part, columns)
    tl.store(shift_ptr + part * GROUPS + rows, shift, mask=rows < GROUPS)
    tl.store(offset_ptr + part * GROUPS + rows, offset, mask=rows < GROUPS)
    moment += cross + tl.trans(cross) - columns * offset[:, None] * offset[None, :]
    store_matrix(moment_ptr, part, rows, rows, moment, GROUPS)


@jit
def _mean_of(shift_ptr, offset_ptr, s, splits, row, exists, GROUPS: constexpr):
    """Return means relative to the shift of the first split."""
    inside = (s < splits)[:, None] & exists[None, :]
    at = s[:, None] * GROUPS + row[None, :]
    shift = tl.load(shift_ptr + at, mask=inside, other=0.0) - tl.load(shift_ptr + row, mask=exists, other=0.0)[None, :]
    return shift + tl.load(offset_ptr + at, mask=inside, other=0.0)


@jit
def _merge(
    count_ptr, shift_ptr, offset_ptr, moment_ptr, mean_ptr, covariance_ptr, splits, columns,
    GROUPS: constexpr, AT_ONCE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Merge the splits of a sample, for BLOCK elements of the covariance.

    covariance = sum_s (moment_s + count_s (mean_s - mean) (mean_s - mean)^T) / M (Chan, Golub and LeVeque, 1979).
    """
    n = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b, exists = element // GROUPS, element % GROUPS, element < GROUPS * GROUPS
    count_ptr += n * splits
    shift_ptr += n * splits * GROUPS
    offset_ptr += n * splits * GROUPS
    moment_ptr += n * splits * (GROUPS * GROUPS)
    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, splits, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        count = tl.load(count_ptr + s, mask=s < splits, other=0.0)[:, None]
        sum_a += tl.sum(count * _mean_of(shift_ptr, offset_ptr, s, splits, a, exists, GROUPS), 0)
        sum_b += tl.sum(count * _mean_of(shift_ptr, offset_ptr, s, splits, b, exists, GROUPS), 0)
    mean_a, mean_b = sum_a / columns, sum_b / columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, splits, AT_ONCE):
        s = start + tl.arange(0, AT_ONCE)
        count = tl.load(count_ptr + s, mask=s < splits, other=0.0)[:, None]
        distance_a = _mean_of(shift_ptr, offset_ptr, s, splits, a, exists, GROUPS) - mean_a[None, :]
        distance_b = _mean_of(shift_ptr, offset_ptr, s, splits, b, exists, GROUPS) - mean_b[None, :]
        at = s[:, None].to(tl.int64) * (GROUPS * GROUPS) + element[None, :]
        moment = tl.load(moment_ptr + at, mask=(s < splits)[:, None] & exists[None, :], other=0.0)
        total += tl.sum(moment + count * distance_a * distance_b, 0)
    mean = tl.load(shift_ptr + a, mask=exists, other=0.0) + mean_a
    tl.store(mean_ptr + n * GROUPS + a, mean, mask=exists & (b == 0))
    tl.store(covariance_ptr + n * (GROUPS * GROUPS) + element, total / columns, mask=exists)


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Implement ``Backend.statistics`` in two launches."""
    n = x.shape[0]
    tiling, (x_strides,) = launch.layouts(groups, launch.tile_columns_for(x, groups), x)
    splits, per_split = launch.split(tiling.tiles, n, 3, x.device, limited=True)
    count = launch.empty(x, n, splits)
    shift, offset = launch.empty(x, n, splits, groups), launch.empty(x, n, splits, groups)
    moment = launch.empty(x, n, splits, groups, groups)
    mean, covariance = launch.empty(x, n, groups), launch.empty(x, n, groups, groups)
    launch.run(
        _moments, (n, splits), like=x, warps=launch.warps_for(groups), stages=3,
        x_ptr=x, x_n=x_strides.sample, x_outer=x_strides.outer, X_J=x_strides.j_first,
        count_ptr=count, shift_ptr=shift, offset_ptr=offset, moment_ptr=moment,
        positions=tiling.positions, tiles=tiling.tiles, per_split=per_split,
        GROUPS=groups, ROWS=tiling.rows, CPG=tiling.cpg, JB=tiling.jb, PB=tiling.pb, VECTOR=tiling.vector,
        PRECISION=launch.input_precision(x),
    )  # fmt: skip
    block = 128  # so small that even the merge of one sample occupies many multiprocessors
    launch.run(
        _merge, (n, triton.cdiv(groups * groups, block)), like=x, warps=4, stages=1,
        count_ptr=count, shift_ptr=shift, offset_ptr=offset, moment_ptr=moment,
        mean_ptr=mean, covariance_ptr=covariance, splits=splits, columns=float(x[0].numel() // groups),
        GROUPS=groups, AT_ONCE=16, BLOCK=block,
    )  # fmt: skip
    return mean, covariance
