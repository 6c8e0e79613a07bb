"""The passes over the input and the gradient of the output that the backward pass takes."""
# mypy: disallow-untyped-defs=False
# (the parameters of a kernel get their types at its launch)

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

from torch import Tensor

from . import launch_args as launch
from .compiler import constexpr, jit, tl
from .tiles import load_matrix, load_per_channel, load_rows, of_sample, store_matrix, tile_columns, tile_offsets


@jit
def _products(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, y_ptr, through_ptr, through_n, through_outer,
    mean_ptr, product_ptr, sum_ptr, samples, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, THROUGH_J: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """dY_j (X_j - mean)^T and the row sums of dY_j for one j and one chunk of the positions of one sample.

    With y, the result of a ReLU, dY is what that lets through, which is also written.
    """
    j, n, first = tl.program_id(0) // samples, tl.program_id(0) % samples, tl.program_id(1) * per_split
    if CPG == 1:  # known to be 0, as in tile_columns
        j *= 0
    x_ptr, dy_ptr = of_sample(x_ptr, n, x_n, VECTOR), of_sample(dy_ptr, n, dy_n, VECTOR)
    if y_ptr is not None:
        y_ptr, through_ptr = of_sample(y_ptr, n, through_n, VECTOR), of_sample(through_ptr, n, through_n, VECTOR)
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
            through = tile_offsets(rows, j, p, through_outer, CPG, VECTOR, THROUGH_J)
            y = tl.load(y_ptr + through, mask=inside, other=0.0)
            dy = tl.where(y <= 0, 0.0, dy)  # not y > 0: like torch's ReLU it lets pass what belongs to NaN
            tl.store(through_ptr + through, dy, mask=inside)
        centred = (x.to(tl.float32) - mean[:, None]).to(OPERAND)
        product = tl.dot(dy.to(OPERAND), tl.trans(centred), product, input_precision=PRECISION)
        total += dy.to(tl.float32)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    store_matrix(product_ptr, part, rows, rows, product, GROUPS)
    tl.store(sum_ptr + part * GROUPS + rows, tl.sum(total, 1), mask=rows < GROUPS)


@jit
def _apply_backward(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, dx_ptr, dx_n, dx_outer,
    mean_ptr, whitening_ptr, weight_ptr, symmetric_ptr, shift_ptr, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, DX_J: constexpr, IN_PLACE: constexpr,
    DEPTH: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """dx = whitening (weight * dy) + symmetric (x - mean) - shift for a chunk of columns; DEPTH as in _apply."""
    n, first = tl.program_id(0), tl.program_id(1) * per_split
    x_ptr, dy_ptr = of_sample(x_ptr, n, x_n, VECTOR), of_sample(dy_ptr, n, dy_n, VECTOR)
    dx_ptr = of_sample(dx_ptr, n, dx_n, VECTOR)
    rows = tl.arange(0, ROWS)
    shift = load_rows(shift_ptr, n, rows, GROUPS)
    if DEPTH == ROWS:
        mean = load_rows(mean_ptr, n, rows, GROUPS)
        whitening = load_matrix(whitening_ptr, n, rows, rows, GROUPS).to(OPERAND)
        symmetric = load_matrix(symmetric_ptr, n, rows, rows, GROUPS).to(OPERAND)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = tile_columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        dx = tl.zeros([ROWS, JB * PB], tl.float32)
        for depth in tl.range(0, ROWS, DEPTH):  # one turn if the matrices are held
            k = depth + tl.arange(0, DEPTH)
            if DEPTH != ROWS:
                mean = load_rows(mean_ptr, n, k, GROUPS)
                whitening = load_matrix(whitening_ptr, n, rows, k, GROUPS).to(OPERAND)
                symmetric = load_matrix(symmetric_ptr, n, rows, k, GROUPS).to(OPERAND)
            inside = (k < GROUPS)[:, None] & exists[None, :]
            x = tl.load(x_ptr + tile_offsets(k, j, p, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
            dy = tl.load(dy_ptr + tile_offsets(k, j, p, dy_outer, CPG, VECTOR, DY_J), mask=inside, other=0.0)
            scaled = dy.to(tl.float32)
            if weight_ptr is not None:
                scaled *= load_per_channel(weight_ptr, k, j, GROUPS, CPG, JB)
            dx = tl.dot(whitening, scaled.to(OPERAND), dx, input_precision=PRECISION)
            centred = (x.to(tl.float32) - mean[:, None]).to(OPERAND)
            dx = tl.dot(symmetric, centred, dx, input_precision=PRECISION)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        dx -= shift[:, None]
        if IN_PLACE:  # every thread has read its part of the tile of dy before any writes to it
            tl.debug_barrier()
        tl.store(dx_ptr + tile_offsets(rows, j, p, dx_outer, CPG, VECTOR, DX_J), dx, mask=inside)


def grad_products(
    x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """``dy_j @ (x_j - mean)^T`` for every channel j of a group, and the sums of ``dy`` over positions.

    With ``y``, the result of a ReLU, of what it lets through of ``dy``, which is written to ``out``; without, ``out``
    is left alone.

    Returns:
        (C / g, N, g, g) and (C / g, N, g).
    """
    # a tile of y as well takes registers: so they are smaller
    columns = launch.columns_of(x, groups, launch.TILE_BYTES if y is None else launch.TILE_BYTES // 2)
    arguments = launch.arguments_of(groups, columns, channels_apart=True, x=x, dy=dy, through=out)
    n, cpg = x.shape[0], arguments["CPG"]
    splits, per_split = launch.split(arguments["tiles"], n * cpg, 2, x.device)
    products, sums = launch.empty(x, cpg, n, splits, groups, groups), launch.empty(x, cpg, n, splits, groups)
    launch.run(
        _products, (n * cpg, splits), x, launch.warps_of(groups), 3 if groups <= 64 else 2, **arguments,
        y_ptr=None if y is None else launch.laid_out_as(out, y), mean_ptr=mean.contiguous(),
        product_ptr=products, sum_ptr=sums, samples=n, per_split=per_split, **launch.precision(x),
    )  # fmt: skip
    return (products[:, :, 0], sums[:, :, 0]) if splits == 1 else (products.sum(2), sums.sum(2))


def apply_backward(
    x: Tensor,
    mean: Tensor,
    dy: Tensor,
    whitening: Tensor,
    weight: Tensor | None,
    symmetric: Tensor,
    shift: Tensor,
    out: Tensor,
) -> None:
    """Writes ``whitening @ (weight * dy) + symmetric @ (x - mean) - shift`` to ``out`` (or ``dy``), in one launch."""
    groups = whitening.shape[-1]
    depth, columns = launch.held(x, groups)
    arguments = launch.arguments_of(groups, columns, x=x, dy=dy, dx=out)
    splits, per_split = launch.split(arguments["tiles"], x.shape[0], 2, x.device)
    launch.run(
        _apply_backward, (x.shape[0], splits), x, launch.warps_of(groups), stages=2, **arguments,
        mean_ptr=mean.contiguous(), whitening_ptr=whitening.contiguous(),
        weight_ptr=None if weight is None else weight.contiguous(),
        symmetric_ptr=symmetric.contiguous(), shift_ptr=shift.contiguous(),
        per_split=per_split, IN_PLACE=dy.data_ptr() == out.data_ptr(), DEPTH=depth, **launch.precision(x),
    )  # fmt: skip
