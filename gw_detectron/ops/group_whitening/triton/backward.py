"""Backward pass: products of gradient and input, then input gradient."""

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

import torch
from torch import Tensor

from ..closed_form import InputGradient
from . import launch_args as launch
from .compiler import constexpr, jit, tl
from .tiles import load_matrix, load_per_channel, load_rows, sample_ptr, store_matrix, tile_columns, tile_offsets


@jit
def _products(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, y_ptr, masked_ptr, masked_n, masked_outer,
    mean_ptr, product_ptr, sum_ptr, samples, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, MASKED_J: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute products and sums for one j and one split of positions.

    The product is dY_j (X_j - mean)^T, the sums are those of the rows of dY_j. If y_ptr is given, dY is zeroed where
    y <= 0, and the masked gradient is stored.
    """
    j, n, first = tl.program_id(0) // samples, tl.program_id(0) % samples, tl.program_id(1) * per_split
    if CPG == 1:  # tells the compiler that j is 0, as in tile_columns
        j *= 0
    x_ptr, dy_ptr = sample_ptr(x_ptr, n, x_n, VECTOR), sample_ptr(dy_ptr, n, dy_n, VECTOR)
    if y_ptr is not None:
        y_ptr, masked_ptr = sample_ptr(y_ptr, n, masked_n, VECTOR), sample_ptr(masked_ptr, n, masked_n, VECTOR)
    rows = tl.arange(0, ROWS)
    mean = load_rows(mean_ptr, n, rows, GROUPS)
    total = tl.zeros([ROWS, PB], tl.float32)
    product = tl.zeros([ROWS, ROWS], tl.float32)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        _, p, exists = tile_columns(tile, positions, 1, 1, PB, VECTOR, X_J)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        x = tl.load(x_ptr + tile_offsets(rows, j, p, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
        dy = tl.load(dy_ptr + tile_offsets(rows, j, p, dy_outer, CPG, VECTOR, DY_J), mask=inside, other=0.0)
        if y_ptr is not None:
            masked = tile_offsets(rows, j, p, masked_outer, CPG, VECTOR, MASKED_J)
            y = tl.load(y_ptr + masked, mask=inside, other=0.0)
            dy = tl.where(y <= 0, 0.0, dy)  # not y > 0: where y is NaN, torch's ReLU passes the gradient on
            tl.store(masked_ptr + masked, dy, mask=inside)
        centered = (x.to(tl.float32) - mean[:, None]).to(OPERAND)
        product = tl.dot(dy.to(OPERAND), tl.trans(centered), product, input_precision=PRECISION)
        total += dy.to(tl.float32)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    store_matrix(product_ptr, part, rows, rows, product, GROUPS)
    tl.store(sum_ptr + part * GROUPS + rows, tl.sum(total, 1), mask=rows < GROUPS)


@jit
def _apply_backward(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, dx_ptr, dx_n, dx_outer,
    mean_ptr, whitening_ptr, weight_ptr, slope_ptr, shift_ptr, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, DX_J: constexpr, IN_PLACE: constexpr,
    DEPTH: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute dx for one split of the columns; DEPTH as in _apply.

    dx = W (weight * dy) + S (x - mean) - shift.
    """
    n, first = tl.program_id(0), tl.program_id(1) * per_split
    x_ptr, dy_ptr = sample_ptr(x_ptr, n, x_n, VECTOR), sample_ptr(dy_ptr, n, dy_n, VECTOR)
    dx_ptr = sample_ptr(dx_ptr, n, dx_n, VECTOR)
    rows = tl.arange(0, ROWS)
    shift = load_rows(shift_ptr, n, rows, GROUPS)
    if DEPTH == ROWS:
        mean = load_rows(mean_ptr, n, rows, GROUPS)
        whitening = load_matrix(whitening_ptr, n, rows, rows, GROUPS).to(OPERAND)
        slope = load_matrix(slope_ptr, n, rows, rows, GROUPS).to(OPERAND)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = tile_columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        dx = tl.zeros([ROWS, JB * PB], tl.float32)
        for depth in tl.range(0, ROWS, DEPTH):  # a single iteration if the matrices are in registers
            k = depth + tl.arange(0, DEPTH)
            if DEPTH != ROWS:
                mean = load_rows(mean_ptr, n, k, GROUPS)
                whitening = load_matrix(whitening_ptr, n, rows, k, GROUPS).to(OPERAND)
                slope = load_matrix(slope_ptr, n, rows, k, GROUPS).to(OPERAND)
            inside = (k < GROUPS)[:, None] & exists[None, :]
            x = tl.load(x_ptr + tile_offsets(k, j, p, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
            dy = tl.load(dy_ptr + tile_offsets(k, j, p, dy_outer, CPG, VECTOR, DY_J), mask=inside, other=0.0)
            scaled = dy.to(tl.float32)
            if weight_ptr is not None:
                scaled *= load_per_channel(weight_ptr, k, j, GROUPS, CPG, JB)
            dx = tl.dot(whitening, scaled.to(OPERAND), dx, input_precision=PRECISION)
            centered = (x.to(tl.float32) - mean[:, None]).to(OPERAND)
            dx = tl.dot(slope, centered, dx, input_precision=PRECISION)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        dx -= shift[:, None]
        if IN_PLACE:  # all threads have read their part of the dy tile before any thread writes to it
            tl.debug_barrier()
        tl.store(dx_ptr + tile_offsets(rows, j, p, dx_outer, CPG, VECTOR, DX_J), dx, mask=inside)


def grad_products(
    x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Implement ``Backend.grad_products`` in one launch."""
    columns = launch.tile_columns_for(x, groups, 1 if y is None else 2)  # a tile of y takes registers, too
    tiling, (x_strides, dy_strides, out_strides) = launch.layouts(groups, columns, x, dy, out, one_j=True)
    n, cpg = x.shape[0], tiling.cpg
    splits, per_split = launch.split(tiling.tiles, n * cpg, 2, x.device)
    if y is not None and y.stride() != out.stride():
        y = torch.empty_like(out).copy_(y)
    products, sums = launch.empty(x, cpg, n, splits, groups, groups), launch.empty(x, cpg, n, splits, groups)
    launch.run(
        _products, (n * cpg, splits), like=x, warps=launch.warps_for(groups), stages=3 if groups <= 64 else 2,
        x_ptr=x, x_n=x_strides.sample, x_outer=x_strides.outer, X_J=x_strides.j_first,
        dy_ptr=dy, dy_n=dy_strides.sample, dy_outer=dy_strides.outer, DY_J=dy_strides.j_first,
        y_ptr=y,
        masked_ptr=out, masked_n=out_strides.sample, masked_outer=out_strides.outer, MASKED_J=out_strides.j_first,
        mean_ptr=mean.contiguous(), product_ptr=products, sum_ptr=sums,
        samples=n, positions=tiling.positions, tiles=tiling.tiles, per_split=per_split,
        GROUPS=groups, ROWS=tiling.rows, CPG=cpg, PB=tiling.pb, VECTOR=tiling.vector,
        OPERAND=launch.operand_dtype(x), PRECISION=launch.input_precision(x),
    )  # fmt: skip
    return (products[:, :, 0], sums[:, :, 0]) if splits == 1 else (products.sum(2), sums.sum(2))


def apply_backward(
    x: Tensor, mean: Tensor, dy: Tensor, weight: Tensor | None, terms: InputGradient, out: Tensor
) -> None:
    """Implement ``Backend.apply_backward`` in one launch."""
    groups = mean.shape[1]
    depth, columns = launch.matrix_tiles(x, groups)
    tiling, (x_strides, dy_strides, dx_strides) = launch.layouts(groups, columns, x, dy, out)
    splits, per_split = launch.split(tiling.tiles, x.shape[0], 2, x.device)
    launch.run(
        _apply_backward, (x.shape[0], splits), like=x, warps=launch.warps_for(groups), stages=2,
        x_ptr=x, x_n=x_strides.sample, x_outer=x_strides.outer, X_J=x_strides.j_first,
        dy_ptr=dy, dy_n=dy_strides.sample, dy_outer=dy_strides.outer, DY_J=dy_strides.j_first,
        dx_ptr=out, dx_n=dx_strides.sample, dx_outer=dx_strides.outer, DX_J=dx_strides.j_first,
        mean_ptr=mean.contiguous(), whitening_ptr=terms.whitening.contiguous(), slope_ptr=terms.slope.contiguous(),
        weight_ptr=None if weight is None else weight.contiguous(), shift_ptr=terms.shift.contiguous(),
        positions=tiling.positions, tiles=tiling.tiles, per_split=per_split,
        GROUPS=groups, ROWS=tiling.rows, CPG=tiling.cpg, JB=tiling.jb, PB=tiling.pb, VECTOR=tiling.vector,
        IN_PLACE=dy is out or (not dy.is_meta and dy.data_ptr() == out.data_ptr()), DEPTH=depth,
        OPERAND=launch.operand_dtype(x), PRECISION=launch.input_precision(x),
    )  # fmt: skip
