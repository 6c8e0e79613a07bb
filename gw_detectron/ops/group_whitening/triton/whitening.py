"""Forward pass: center, whiten, scale, shift, ReLU."""

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

from torch import Tensor

from . import launch
from .compiler import constexpr, jit, tl
from .tiles import (
    input_scale,
    load_matrix,
    load_per_channel,
    load_rows,
    multiply_half,
    sample_ptr,
    split_half,
    split_matrix,
    tile_columns,
    tile_offsets,
    to_operand,
)


@jit
def _apply(
    x_ptr, x_n, x_outer, y_ptr, y_n, y_outer, mean_ptr, sigma_ptr, whitening_ptr, weight_ptr, bias_ptr,
    positions, tiles, per_split, columns,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, Y_J: constexpr, RELU: constexpr, DEPTH: constexpr, HALVES: constexpr, OPERAND: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Compute y for one split of a sample's columns.

    y = weight * (W (x - mean)) + bias, with ReLU if RELU. W is loaded once if DEPTH == ROWS. Otherwise each tile reads
    it in slices of DEPTH columns. If HALVES, W and x are split into two float16 each. They are scaled by powers of two
    before, as |x - mean|^2 <= M tr Sigma in every element.
    """
    n, first = tl.program_id(0), tl.program_id(1) * per_split
    x_ptr, y_ptr = sample_ptr(x_ptr, n, x_n, VECTOR), sample_ptr(y_ptr, n, y_n, VECTOR)
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
        for depth in tl.range(0, ROWS, DEPTH):  # a single iteration if W is in registers
            k = depth + tl.arange(0, DEPTH)
            if DEPTH != ROWS:
                mean = load_rows(mean_ptr, n, k, GROUPS)
                whitening = to_operand(load_matrix(whitening_ptr, n, rows, k, GROUPS), OPERAND, PRECISION)
            inside = (k < GROUPS)[:, None] & exists[None, :]
            x = tl.load(x_ptr + tile_offsets(k, j, p, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
            centered = x.to(tl.float32) - mean[:, None]
            if HALVES:
                x_high, x_low = split_half(centered * scale)
                y = multiply_half(high, low, x_high, x_low) * inverse
            else:
                y = tl.dot(whitening, to_operand(centered, OPERAND, PRECISION), y, input_precision=PRECISION)
        if weight_ptr is not None:
            y *= load_per_channel(weight_ptr, rows, j, GROUPS, CPG, JB)
        if bias_ptr is not None:
            y += load_per_channel(bias_ptr, rows, j, GROUPS, CPG, JB)
        if RELU:
            y = tl.where(y < 0, 0.0, y)  # keeps NaN
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        tl.store(y_ptr + tile_offsets(rows, j, p, y_outer, CPG, VECTOR, Y_J), y, mask=inside)


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
    _, columns = launch.over_columns(
        launch.tuning_for(x).apply, groups, columns=launch.columns_beside_slices(groups), x=x, y=out
    )
    launch.run(
        _apply, **columns, mean_ptr=mean, sigma_ptr=sigma, whitening_ptr=whitening, weight_ptr=weight, bias_ptr=bias,
        columns=float(x[0].numel() // groups), RELU=relu, **launch.matrix_operands(x, groups),
    )  # fmt: skip
