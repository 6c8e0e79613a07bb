"""Forward pass: means and covariances, per split of the columns, then merged; the output."""

from __future__ import (
    annotations,  # without triton, constexpr is only a name in the signatures
)

from torch import Tensor

from . import plans
from .compiler import constexpr, jit, tl, triton
from .device_functions import (
    input_scale,
    load_matrix,
    load_per_channel,
    load_rows,
    multiply_half,
    round_tf32,
    sample_ptr,
    split_half,
    split_matrix,
    split_tf32,
    store_matrix,
    tile_columns,
    tile_offsets,
    to_operand,
)
from .tiling import over_columns, padded_rows, tuning_for


@jit
def _moments(
    x_ptr, x_n, x_outer, count_ptr, shift_ptr, offset_ptr, moment_ptr, positions, tiles, per_split, eps,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute count, mean and centered second moments of one split.

    The mean is the sum of shift and offset. If count_ptr is None, the split is the whole sample:
    the mean and the covariance, with eps, go to offset_ptr and moment_ptr.
    """
    n = tl.program_id(0)
    index = tl.program_id(1)
    first = index * per_split
    x_ptr = sample_ptr(x_ptr, n, x_n, VECTOR)
    rows = tl.arange(0, ROWS)

    # Second moments about a value near the mean do not cancel. The mean of the first tile is such a
    # value, even if the first column is an outlier. It is computed as a distance from that column,
    # which is exact for constant rows.
    j, p, exists = tile_columns(first, positions, CPG, JB, PB, VECTOR, X_J)
    present = (rows < GROUPS)[:, None] & exists[None, :]
    start = tl.load(
        x_ptr + tile_offsets(rows, j, p, x_outer, CPG, VECTOR, X_J),
        mask=present,
        other=0.0,
    )
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
        x = tl.load(
            x_ptr + tile_offsets(rows, j, p, x_outer, CPG, VECTOR, X_J),
            mask=inside,
            other=0.0,
        )
        x = tl.where(inside, x.to(tl.float32) - shift[:, None], 0.0)
        count += exists.to(tl.float32)
        total += x

        if PRECISION == "tf32x3":
            # x = high + low; a symmetric result needs only two of the three products
            high, low = split_tf32(x)
            moment = tl.dot(high, tl.trans(high), moment, input_precision="tf32")
            cross = tl.dot(high, tl.trans(low), cross, input_precision="tf32")
        else:
            x = round_tf32(x)
            moment = tl.dot(x, tl.trans(x), moment, input_precision=PRECISION)

    columns = tl.sum(count, 0)
    offset = tl.sum(total, 1) / columns  # of the mean, relative to the shift
    moment += cross + tl.trans(cross) - columns * offset[:, None] * offset[None, :]

    part = n.to(tl.int64) * tl.num_programs(1) + index
    if count_ptr is None:
        moment = moment / columns + tl.where(rows[:, None] == rows[None, :], eps, 0.0)
        offset += shift
    else:
        tl.store(count_ptr + part, columns)
        tl.store(shift_ptr + part * GROUPS + rows, shift, mask=rows < GROUPS)
    tl.store(offset_ptr + part * GROUPS + rows, offset, mask=rows < GROUPS)
    store_matrix(moment_ptr, part, rows, rows, moment, GROUPS)


@jit
def _mean_of(shift_ptr, offset_ptr, s, splits, first, rows, GROUPS: constexpr):
    """Return means of splits relative to ``first``, the shift of the first split."""
    inside = (s < splits)[:, None] & (rows < GROUPS)[None, :]
    at = s[:, None] * GROUPS + rows[None, :]
    shift = tl.load(shift_ptr + at, mask=inside, other=0.0) - first[None, :]
    return shift + tl.load(offset_ptr + at, mask=inside, other=0.0)


@jit
def _merge(
    count_ptr, shift_ptr, offset_ptr, moment_ptr, mean_ptr, covariance_ptr, splits, columns, eps,
    GROUPS: constexpr, ROWS: constexpr, AT_ONCE: constexpr,
):  # fmt: skip
    """Merge the splits of a sample, for one row of the covariance.

    covariance = sum_s (moment_s + count_s (mean_s - mean) (mean_s - mean)^T) / M, and eps on its
    diagonal.

    Source: Chan, Golub and LeVeque (1979).
    """
    n = tl.program_id(0)
    row = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    part = n.to(tl.int64) * splits
    count_ptr += part
    shift_ptr += part * GROUPS
    offset_ptr += part * GROUPS
    moment_ptr += part * (GROUPS * GROUPS) + row * GROUPS

    first = tl.load(shift_ptr + rows, mask=rows < GROUPS, other=0.0)
    sums = tl.zeros([AT_ONCE, ROWS], tl.float32)
    for start in tl.range(0, splits, AT_ONCE, num_stages=3):
        s = start + tl.arange(0, AT_ONCE)
        count = tl.load(count_ptr + s, mask=s < splits, other=0.0)
        sums += count[:, None] * _mean_of(
            shift_ptr, offset_ptr, s, splits, first, rows, GROUPS
        )
    mean = tl.sum(sums, 0) / columns

    sums = tl.zeros([AT_ONCE, ROWS], tl.float32)
    for start in tl.range(0, splits, AT_ONCE, num_stages=3):
        s = start + tl.arange(0, AT_ONCE)
        count = tl.load(count_ptr + s, mask=s < splits, other=0.0)
        distance = (
            _mean_of(shift_ptr, offset_ptr, s, splits, first, rows, GROUPS)
            - mean[None, :]
        )
        own = tl.sum(tl.where((rows == row)[None, :], distance, 0.0), 1)

        at = s[:, None].to(tl.int64) * (GROUPS * GROUPS) + rows[None, :]
        inside = (s < splits)[:, None] & (rows < GROUPS)[None, :]
        moment = tl.load(moment_ptr + at, mask=inside, other=0.0)
        sums += moment + (count * own)[:, None] * distance

    covariance = tl.sum(sums, 0) / columns + tl.where(rows == row, eps, 0.0)
    tl.store(
        covariance_ptr + (n.to(tl.int64) * GROUPS + row) * GROUPS + rows,
        covariance,
        mask=rows < GROUPS,
    )
    tl.store(mean_ptr + n * GROUPS + rows, first + mean, mask=rows == row)


def statistics(
    x: Tensor, groups: int, eps: float, mean: Tensor, covariance: Tensor
) -> None:
    """Write the mean (N, g) and the covariance with eps (N, g, g) of each sample.

    In one launch, or two if samples are split.
    """
    n = x.shape[0]
    setting = tuning_for(x).moments
    splits, columns = over_columns(setting, groups, limited=True, x=x)
    if splits == 1:
        plans.run(
            _moments, **columns,
            count_ptr=None, shift_ptr=None, offset_ptr=mean, moment_ptr=covariance, eps=eps,
        )  # fmt: skip
        return

    count = plans.empty(x, n, splits)
    shift = plans.empty(x, n, splits, groups)
    offset = plans.empty(x, n, splits, groups)
    moment = plans.empty(x, n, splits, groups, groups)
    plans.run(
        _moments, **columns,
        count_ptr=count, shift_ptr=shift, offset_ptr=offset, moment_ptr=moment, eps=eps,
    )  # fmt: skip

    rows = padded_rows(groups)
    plans.run(
        _merge, (n, groups), like=x, warps=4, stages=3,
        count_ptr=count, shift_ptr=shift, offset_ptr=offset, moment_ptr=moment,
        mean_ptr=mean, covariance_ptr=covariance,
        splits=splits, columns=float(x[0].numel() // groups), eps=eps,
        GROUPS=groups, ROWS=rows, AT_ONCE=min(2048 // rows, triton.next_power_of_2(splits)),
    )  # fmt: skip


@jit
def _apply(
    x_ptr, x_n, x_outer, y_ptr, y_n, y_outer, mean_ptr, sigma_ptr, whitening_ptr, weight_ptr, bias_ptr,
    positions, tiles, per_split, columns,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, Y_J: constexpr, RELU: constexpr, DEPTH: constexpr, HALVES: constexpr, OPERAND: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Compute y for one split of a sample's columns.

    y = weight * (W (x - mean)) + bias, with ReLU if RELU. W is loaded once if DEPTH == ROWS.
    Otherwise each tile reads it in slices of DEPTH columns. If HALVES, W and x are split into two
    float16 each. They are scaled by powers of two before, as |x - mean|^2 <= M tr Sigma in every
    element.
    """
    n = tl.program_id(0)
    first = tl.program_id(1) * per_split
    x_ptr = sample_ptr(x_ptr, n, x_n, VECTOR)
    y_ptr = sample_ptr(y_ptr, n, y_n, VECTOR)
    rows = tl.arange(0, ROWS)

    if DEPTH == ROWS:
        mean = load_rows(mean_ptr, n, rows, GROUPS)
        whitening = load_matrix(whitening_ptr, n, rows, rows, GROUPS)
        if HALVES:
            high, low, inverse = split_matrix(whitening)
            scale, inverse_x = input_scale(sigma_ptr, n, rows, columns, GROUPS)
            inverse *= inverse_x
        else:
            whitening = to_operand(whitening, OPERAND, PRECISION)

    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = tile_columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        y = tl.zeros([ROWS, JB * PB], tl.float32)
        # a single iteration if W is in registers
        for depth in tl.range(0, ROWS, DEPTH):
            k = depth + tl.arange(0, DEPTH)
            if DEPTH != ROWS:
                mean = load_rows(mean_ptr, n, k, GROUPS)
                whitening = to_operand(
                    load_matrix(whitening_ptr, n, rows, k, GROUPS), OPERAND, PRECISION
                )

            inside = (k < GROUPS)[:, None] & exists[None, :]
            x = tl.load(
                x_ptr + tile_offsets(k, j, p, x_outer, CPG, VECTOR, X_J),
                mask=inside,
                other=0.0,
            )
            centered = x.to(tl.float32) - mean[:, None]

            if HALVES:
                x_high, x_low = split_half(centered * scale)
                y = multiply_half(high, low, x_high, x_low) * inverse
            else:
                centered = to_operand(centered, OPERAND, PRECISION)
                y = tl.dot(whitening, centered, y, input_precision=PRECISION)

        if weight_ptr is not None:
            y *= load_per_channel(weight_ptr, rows, j, GROUPS, CPG, JB)
        if bias_ptr is not None:
            y += load_per_channel(bias_ptr, rows, j, GROUPS, CPG, JB)
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # keeps NaN

        inside = (rows < GROUPS)[:, None] & exists[None, :]
        tl.store(
            y_ptr + tile_offsets(rows, j, p, y_outer, CPG, VECTOR, Y_J), y, mask=inside
        )


def apply(
    x: Tensor,
    mean: Tensor,
    sigma: Tensor,
    whitening: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    out: Tensor,
) -> None:
    """Write y = weight * (W (x - mean)) + bias to ``out``, with ReLU if ``relu``, in one launch."""
    groups = whitening.shape[-1]
    setting = tuning_for(x).apply
    _, columns = over_columns(setting, groups, matrix=True, x=x, y=out)
    plans.run(
        _apply, **columns,
        mean_ptr=mean, sigma_ptr=sigma, whitening_ptr=whitening, weight_ptr=weight, bias_ptr=bias,
        RELU=relu,
    )  # fmt: skip
