"""Triton kernels of group whitening: tensors as large as the input are read and written as often as by GroupNorm.

Shape shorthand: ``N`` samples, ``C`` channels, ``g`` groups (the side of the covariance matrix), ``cpg = C / g``,
``P`` positions (the product of the spatial sizes), ``M = cpg * P``. Row r of a sample's matrix holds the channels
``r * cpg + j``; a column is a pair (j, p). Statistics, whitening matrices and all sums are float32.

A program works through tiles of all g rows and ``JB * PB`` columns (JB values of j, PB of p; powers of two, masked).
Rows are padded to a power of two with zeros, which no product notices. Programs write partial results that are summed
in a fixed order afterwards, never with atomics: the same input gives the same bits.

Operands of the products that are as long as the input:

============  =========  ==============================================================================================
input         operands   why
============  =========  ==============================================================================================
float32       tf32 x 3   float32's accuracy on tensor cores; plain tf32 where the user allows it for matmuls
float16       tf32       float16's mantissa with float32's range: neither centred values nor whitening matrices overflow
bfloat16      bfloat16   values are centred in float32, then rounded; the covariance itself is taken with tf32
============  =========  ==============================================================================================
"""
# mypy: disallow-untyped-defs=False
# (the parameters of a kernel get their types at its launch)

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

from collections.abc import Callable
from contextlib import nullcontext
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .solvers.covariance import zero_variance

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # a platform without Triton, like macOS
    triton = None
else:
    if [int(part) for part in triton.__version__.split(".")[:2]] < [3, 3]:
        triton = None  # its compiler aborts the process at float16 on Ampere

#: beyond, the covariance of a program does not fit its registers
MAX_GROUPS = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: bytes of x in a tile: small enough that a multiprocessor holds several programs, so that some load while others
#: multiply, and still 128 bytes in a row of float32 with g = 64
TILE_BYTES = 8192
#: tiles of a program that writes a partial g x g result or reads a g x g matrix; with g = 64 one weighs two tiles
MIN_TILES = 4


def supported(x: Tensor, groups: int) -> bool:
    """Whether these kernels take ``x`` (N, C, \\*spatial) in ``groups`` groups: by device, dtype, size and groups."""
    return (
        triton is not None
        and (_interpreted() or _has_tensor_cores(x.device))
        and 1 <= groups <= MAX_GROUPS
        and x.dtype in DTYPES
        and x.numel() > 0
    )


def _interpreted() -> bool:
    """Whether Triton's interpreter, chosen when triton is imported, runs the kernels (on the CPU)."""
    return triton is not None and not isinstance(_moments, triton.JITFunction)


def _has_tensor_cores(device: torch.device) -> bool:
    """For tf32 and bfloat16: NVIDIA's from Ampere on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _jit(kernel: Callable) -> Any:
    """Compiles once for all sizes and strides: what matters about them is told by VECTOR."""
    if triton is None:
        return kernel
    arguments = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    sizes = [name for name in arguments if name not in kernel.__annotations__ and not name.endswith("_ptr")]
    return triton.jit(kernel, do_not_specialize=sizes)


# ---------------------------------------------------------------------------------------- shared by the kernels


@_jit
def _columns(tile, positions, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr, J_FIRST: constexpr):
    """j and p of every column of a tile (j is one number where JB is 1), and whether the column exists."""
    if not J_FIRST:  # the quotient is exact; it tells the compiler that VECTOR neighbours exist together
        positions = positions // VECTOR * VECTOR
    column = tl.arange(0, JB * PB)
    if JB >= CPG:  # known to be 0, so that neighbouring channels are known to be aligned
        j = tile * 0
        p = tile * PB
    else:
        p_tiles = tl.cdiv(positions, PB)
        j = tile // p_tiles * JB
        p = tile % p_tiles * PB
    if JB == 1:
        p += column
    elif J_FIRST:
        j += column % JB
        p += column // JB
    else:
        j += column // PB
        p += column % PB
    return j, p, (j < CPG) & (p < positions)


@_jit
def _offsets(n, rows, j, p, stride_n, outer, CPG: constexpr, VECTOR: constexpr, J_FIRST: constexpr):
    """Offsets of a tile's elements; ``outer`` is the stride of p if J_FIRST, else of channels, and the other is 1."""
    stride = outer.to(tl.int64) // VECTOR * VECTOR
    if J_FIRST:
        row, column = rows.to(tl.int64) * CPG, p * stride + j
    else:
        row, column = rows * (stride * CPG), j * stride + p
    return n * (stride_n.to(tl.int64) // VECTOR * VECTOR) + row[:, None] + column[None, :]


@_jit
def _per_channel(ptr, rows, j, GROUPS: constexpr, CPG: constexpr, JB: constexpr):
    """A parameter of shape (C,) for the channels of a tile, to broadcast against it."""
    if JB == 1:
        value = tl.load(ptr + rows * CPG + j, mask=rows < GROUPS, other=0.0)[:, None]
    else:
        inside = (rows < GROUPS)[:, None] & (j < CPG)[None, :]
        value = tl.load(ptr + rows[:, None] * CPG + j[None, :], mask=inside, other=0.0)
    return value.to(tl.float32)


@_jit
def _load_rows(ptr, n, rows, GROUPS: constexpr):
    """A part of row n of an (N, g) tensor."""
    return tl.load(ptr + n.to(tl.int64) * GROUPS + rows, mask=rows < GROUPS, other=0.0)


@_jit
def _load_matrix(ptr, n, rows, columns, GROUPS: constexpr):
    """A part of matrix n of an (N, g, g) tensor."""
    inside = (rows < GROUPS)[:, None] & (columns < GROUPS)[None, :]
    offsets = n.to(tl.int64) * (GROUPS * GROUPS) + rows[:, None] * GROUPS + columns[None, :]
    return tl.load(ptr + offsets, mask=inside, other=0.0)


@_jit
def _store_matrix(ptr, n, rows, columns, value, GROUPS: constexpr):
    inside = (rows < GROUPS)[:, None] & (columns < GROUPS)[None, :]
    offsets = n.to(tl.int64) * (GROUPS * GROUPS) + rows[:, None] * GROUPS + columns[None, :]
    tl.store(ptr + offsets, value, mask=inside)


# ---------------------------------------------------------------------------------------- statistics


@_jit
def _moments(
    x_ptr, x_n, x_outer, count_ptr, shift_ptr, offset_ptr, moment_ptr, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Count, mean (as the sum of two numbers) and centred second moments of one sample's chunk of columns."""
    n, chunk = tl.program_id(0), tl.program_id(1)
    first = chunk * per_split
    rows = tl.arange(0, ROWS)
    # Second moments about a value near the mean do not cancel. The mean of the first tile is one, whatever the first
    # column is; taken as a distance from that column it is exact for constant rows.
    j, p, exists = _columns(first, positions, CPG, JB, PB, VECTOR, X_J)
    held = (rows < GROUPS)[:, None] & exists[None, :]
    start = tl.load(x_ptr + _offsets(n, rows, j, p, x_n, x_outer, CPG, VECTOR, X_J), mask=held, other=0.0)
    start = start.to(tl.float32)
    column = tl.sum(tl.where((tl.arange(0, JB * PB) == 0)[None, :], start, 0.0), 1)
    distance = tl.where(held, start - column[:, None], 0.0)
    shift = column + tl.sum(distance, 1) / tl.sum(exists.to(tl.float32), 0)
    total = tl.zeros([ROWS, JB * PB], tl.float32)
    moment = tl.zeros([ROWS, ROWS], tl.float32)
    cross = tl.zeros([ROWS, ROWS], tl.float32)
    count = tl.zeros([JB * PB], tl.float32)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = _columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        x = tl.load(x_ptr + _offsets(n, rows, j, p, x_n, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
        x = tl.where(inside, x.to(tl.float32) - shift[:, None], 0.0)
        count += exists.to(tl.float32)
        total += x
        if PRECISION == "tf32x3":  # x = high + low; a symmetric result needs two products of the three
            high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            moment = tl.dot(high, tl.trans(high), moment, input_precision="tf32")
            cross = tl.dot(high, tl.trans(x - high), cross, input_precision="tf32")
        else:
            moment = tl.dot(x, tl.trans(x), moment, input_precision=PRECISION)
    columns = tl.sum(count, 0)
    offset = tl.sum(total, 1) / columns  # of the mean from the shift
    part = n.to(tl.int64) * tl.num_programs(1) + chunk
    tl.store(count_ptr + part, columns)
    tl.store(shift_ptr + part * GROUPS + rows, shift, mask=rows < GROUPS)
    tl.store(offset_ptr + part * GROUPS + rows, offset, mask=rows < GROUPS)
    moment += cross + tl.trans(cross) - columns * offset[:, None] * offset[None, :]
    _store_matrix(moment_ptr, part, rows, rows, moment, GROUPS)


@_jit
def _mean_of(shift_ptr, offset_ptr, s, splits, row, exists, GROUPS: constexpr):
    """Means of chunks s as distances from the shift of the first chunk, which lose no digits to a large mean."""
    inside = (s < splits)[:, None] & exists[None, :]
    at = s[:, None] * GROUPS + row[None, :]
    shift = tl.load(shift_ptr + at, mask=inside, other=0.0) - tl.load(shift_ptr + row, mask=exists, other=0.0)[None, :]
    return shift + tl.load(offset_ptr + at, mask=inside, other=0.0)


@_jit
def _merge(
    count_ptr, shift_ptr, offset_ptr, moment_ptr, mean_ptr, covariance_ptr, splits, columns,
    GROUPS: constexpr, AT_ONCE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Mean and covariance of one sample from those of its chunks, for BLOCK elements of the covariance.

    sum_s (moment_s + count_s (mean_s - mean) (mean_s - mean)^T) / M (Chan, Golub and LeVeque, 1979).
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


# ---------------------------------------------------------------------------------------- Newton's iteration


@_jit
def _padded(i, j, ROWS: constexpr, HEIGHT: constexpr, WIDTH: constexpr):
    """Offsets of block (i, j) of a padded matrix."""
    return (i * HEIGHT + tl.arange(0, HEIGHT))[:, None] * ROWS + (j * WIDTH + tl.arange(0, WIDTH))[None, :]


@_jit
def _times_r(
    x_ptr, q_ptr, out_ptr,
    ROWS: constexpr, BLOCK: constexpr, DEPTH: constexpr, TANGENT: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """X R = (3 X - X Q) / 2; if TANGENT, also its derivative, which lies TANGENT elements behind each matrix."""
    SIDE: constexpr = ROWS // BLOCK
    for block in tl.range(SIDE * SIDE, num_stages=1):
        i, j = block // SIDE, block % SIDE
        product = tl.zeros([BLOCK, BLOCK], tl.float32)
        tangent = tl.zeros([BLOCK, BLOCK], tl.float32)
        for k in tl.range(ROWS // DEPTH, num_stages=3):
            x_part = tl.load(x_ptr + _padded(i, k, ROWS, BLOCK, DEPTH))
            q_part = tl.load(q_ptr + _padded(k, j, ROWS, DEPTH, BLOCK))
            product = tl.dot(x_part, q_part, product, input_precision=PRECISION)
            if TANGENT:
                dq_part = tl.load(q_ptr + TANGENT + _padded(k, j, ROWS, DEPTH, BLOCK))
                tangent = tl.dot(x_part, dq_part, tangent, input_precision=PRECISION)
                dx_part = tl.load(x_ptr + TANGENT + _padded(i, k, ROWS, BLOCK, DEPTH))
                tangent = tl.dot(dx_part, q_part, tangent, input_precision=PRECISION)
        at = _padded(i, j, ROWS, BLOCK, BLOCK)
        tl.store(out_ptr + at, 1.5 * tl.load(x_ptr + at) - 0.5 * product)
        if TANGENT:
            tl.store(out_ptr + TANGENT + at, 1.5 * tl.load(x_ptr + TANGENT + at) - 0.5 * tangent)


@_jit
def _newton(
    sigma_ptr, grad_ptr, whitening_ptr, grad_sigma_ptr, scratch_ptr, samples, num_iters, zero,
    GROUPS: constexpr, ROWS: constexpr, BLOCK: constexpr, DEPTH: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """W = P_T / sqrt(tr Sigma) of every sample and, if given dL/dW, dL/dSigma.

    With Q = P^2 S, S = Sigma / tr Sigma, and R = (3 I - Q) / 2 the step P <- (3 P - P^3 S) / 2 is P <- P R, Q <- Q R R:
    everything is a polynomial of S and commutes. That takes 3 (T - 1) products, and rounding does not grow in them.

    A polynomial of a symmetric matrix has a self-adjoint derivative, so dL/dS is the derivative of P_T in the direction
    sym(dL/dW) / sqrt(tr Sigma): the same iteration on pairs of a value and its derivative, with nothing stored. The
    dependence of S and W on the trace then adds a multiple of the identity.

    Matrices pass between the products through ``scratch``, which stays in the caches: registers and shared memory hold
    one block of a product, whatever g is and whichever the device.
    """
    SIDE: constexpr = ROWS // BLOCK
    SIZE: constexpr = ROWS * ROWS
    TANGENT: constexpr = 0 if grad_ptr is None else 5 * SIZE
    t_ptr = scratch_ptr + tl.program_id(0).to(tl.int64) * (5 * SIZE + TANGENT)
    q_ptr, p_ptr = t_ptr + SIZE, t_ptr + 3 * SIZE  # two of each, one to read and one to write
    n = tl.program_id(0).to(tl.int64)
    while n < samples:
        r = tl.arange(0, ROWS)
        diagonal = tl.load(sigma_ptr + n * (GROUPS * GROUPS) + r * (GROUPS + 1), mask=r < GROUPS, other=0.0)
        trace = tl.sum(diagonal, 0)
        alive = trace > zero
        trace = tl.where(alive, trace, 1.0)
        inv_sqrt = tl.where(alive, 1.0 / tl.sqrt(trace), 0.0)  # zero for a covariance that counts as zero
        for block in tl.range(SIDE * SIDE, num_stages=1):
            i, j = block // SIDE, block % SIDE
            rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
            at = _padded(i, j, ROWS, BLOCK, BLOCK)
            q = _load_matrix(sigma_ptr, n, rows, columns, GROUPS) / trace
            first = tl.where(num_iters > 0, 0.5, 0.0)  # the first step needs no product
            identity = (rows[:, None] == columns[None, :]) & (rows < GROUPS)[:, None]
            tl.store(q_ptr + at, q)
            tl.store(p_ptr + at, tl.where(identity, 1.0 + first, 0.0) - first * q)
            if TANGENT:
                grad = _load_matrix(grad_ptr, n, rows, columns, GROUPS)
                grad += tl.trans(_load_matrix(grad_ptr, n, columns, rows, GROUPS))
                tl.store(q_ptr + TANGENT + at, 0.5 * inv_sqrt * grad)
                tl.store(p_ptr + TANGENT + at, -0.5 * first * inv_sqrt * grad)
        tl.debug_barrier()
        for step in tl.range(1, num_iters, num_stages=1):
            old, new = (step + 1) % 2 * SIZE, step % 2 * SIZE
            _times_r(q_ptr + old, q_ptr + old, t_ptr, ROWS, BLOCK, DEPTH, TANGENT, PRECISION)
            tl.debug_barrier()
            _times_r(t_ptr, q_ptr + old, q_ptr + new, ROWS, BLOCK, DEPTH, TANGENT, PRECISION)
            tl.debug_barrier()
            _times_r(p_ptr + old, q_ptr + new, p_ptr + new, ROWS, BLOCK, DEPTH, TANGENT, PRECISION)
        tl.debug_barrier()
        p_ptr_last = p_ptr + (tl.maximum(num_iters, 1) + 1) % 2 * SIZE
        along = 0.0  # <dL/dS, S> + <dL/dW, P_T> / (2 sqrt(tr))
        for block in tl.range(SIDE * SIDE, num_stages=1):
            i, j = block // SIDE, block % SIDE
            rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
            p = tl.load(p_ptr_last + _padded(i, j, ROWS, BLOCK, BLOCK))
            _store_matrix(whitening_ptr, n, rows, columns, p * inv_sqrt, GROUPS)
            if TANGENT:
                dp = tl.load(p_ptr_last + TANGENT + _padded(i, j, ROWS, BLOCK, BLOCK))
                grad = _load_matrix(grad_ptr, n, rows, columns, GROUPS)
                s = _load_matrix(sigma_ptr, n, rows, columns, GROUPS) / trace
                along += tl.sum(tl.sum(dp * s + 0.5 * inv_sqrt * grad * p, 1), 0)
        if TANGENT:
            for block in tl.range(SIDE * SIDE, num_stages=1):
                i, j = block // SIDE, block % SIDE
                rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
                dp = tl.load(p_ptr_last + TANGENT + _padded(i, j, ROWS, BLOCK, BLOCK))
                dp -= tl.where(rows[:, None] == columns[None, :], along, 0.0)
                _store_matrix(grad_sigma_ptr, n, rows, columns, dp * inv_sqrt * inv_sqrt, GROUPS)
        tl.debug_barrier()  # before the next sample takes the scratch
        n += tl.num_programs(0)


# ---------------------------------------------------------------------------------------- centre, whiten, affine


@_jit
def _apply(
    x_ptr, x_n, x_outer, y_ptr, y_n, y_outer, mean_ptr, whitening_ptr, weight_ptr, bias_ptr,
    positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, Y_J: constexpr, DEPTH: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """y = weight * (W (x - mean)) + bias for one sample's chunk of columns.

    W is held if it is one product deep; else DEPTH columns of it are read for every tile.
    """
    n, first = tl.program_id(0), tl.program_id(1) * per_split
    rows = tl.arange(0, ROWS)
    if DEPTH == ROWS:
        mean = _load_rows(mean_ptr, n, rows, GROUPS)
        whitening = _load_matrix(whitening_ptr, n, rows, rows, GROUPS).to(OPERAND)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = _columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        y = tl.zeros([ROWS, JB * PB], tl.float32)
        for depth in tl.range(0, ROWS, DEPTH):  # one turn if the matrices are held
            k = depth + tl.arange(0, DEPTH)
            if DEPTH != ROWS:
                mean = _load_rows(mean_ptr, n, k, GROUPS)
                whitening = _load_matrix(whitening_ptr, n, rows, k, GROUPS).to(OPERAND)
            inside = (k < GROUPS)[:, None] & exists[None, :]
            x = tl.load(x_ptr + _offsets(n, k, j, p, x_n, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
            centred = (x.to(tl.float32) - mean[:, None]).to(OPERAND)
            y = tl.dot(whitening, centred, y, input_precision=PRECISION)
        if weight_ptr is not None:
            y *= _per_channel(weight_ptr, rows, j, GROUPS, CPG, JB)
        if bias_ptr is not None:
            y += _per_channel(bias_ptr, rows, j, GROUPS, CPG, JB)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        tl.store(y_ptr + _offsets(n, rows, j, p, y_n, y_outer, CPG, VECTOR, Y_J), y, mask=inside)


@_jit
def _products(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, mean_ptr, product_ptr, sum_ptr, samples, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """dY_j (X_j - mean)^T and the row sums of dY_j for one j and one chunk of the positions of one sample."""
    j, n, first = tl.program_id(0) // samples, tl.program_id(0) % samples, tl.program_id(1) * per_split
    if CPG == 1:  # known to be 0, as in _columns
        j *= 0
    rows = tl.arange(0, ROWS)
    mean = _load_rows(mean_ptr, n, rows, GROUPS)
    total = tl.zeros([ROWS, PB], tl.float32)
    product = tl.zeros([ROWS, ROWS], tl.float32)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        _, p, exists = _columns(tile, positions, 1, 1, PB, VECTOR, X_J)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        x = tl.load(x_ptr + _offsets(n, rows, j, p, x_n, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
        dy = tl.load(dy_ptr + _offsets(n, rows, j, p, dy_n, dy_outer, CPG, VECTOR, DY_J), mask=inside, other=0.0)
        centred = (x.to(tl.float32) - mean[:, None]).to(OPERAND)
        product = tl.dot(dy.to(OPERAND), tl.trans(centred), product, input_precision=PRECISION)
        total += dy.to(tl.float32)
    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    _store_matrix(product_ptr, part, rows, rows, product, GROUPS)
    tl.store(sum_ptr + part * GROUPS + rows, tl.sum(total, 1), mask=rows < GROUPS)


@_jit
def _apply_backward(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, dx_ptr, dx_n, dx_outer,
    mean_ptr, whitening_ptr, weight_ptr, symmetric_ptr, shift_ptr, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, DX_J: constexpr, DEPTH: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """dx = W^T (weight * dy) + symmetric (x - mean) - shift for one sample's chunk of columns; DEPTH as in _apply."""
    n, first = tl.program_id(0), tl.program_id(1) * per_split
    rows = tl.arange(0, ROWS)
    shift = _load_rows(shift_ptr, n, rows, GROUPS)
    if DEPTH == ROWS:
        mean = _load_rows(mean_ptr, n, rows, GROUPS)
        whitening = tl.trans(_load_matrix(whitening_ptr, n, rows, rows, GROUPS)).to(OPERAND)
        symmetric = _load_matrix(symmetric_ptr, n, rows, rows, GROUPS).to(OPERAND)
    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = _columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        dx = tl.zeros([ROWS, JB * PB], tl.float32)
        for depth in tl.range(0, ROWS, DEPTH):  # one turn if the matrices are held
            k = depth + tl.arange(0, DEPTH)
            if DEPTH != ROWS:
                mean = _load_rows(mean_ptr, n, k, GROUPS)
                whitening = tl.trans(_load_matrix(whitening_ptr, n, k, rows, GROUPS)).to(OPERAND)
                symmetric = _load_matrix(symmetric_ptr, n, rows, k, GROUPS).to(OPERAND)
            inside = (k < GROUPS)[:, None] & exists[None, :]
            x = tl.load(x_ptr + _offsets(n, k, j, p, x_n, x_outer, CPG, VECTOR, X_J), mask=inside, other=0.0)
            dy = tl.load(dy_ptr + _offsets(n, k, j, p, dy_n, dy_outer, CPG, VECTOR, DY_J), mask=inside, other=0.0)
            scaled = dy.to(tl.float32)
            if weight_ptr is not None:
                scaled *= _per_channel(weight_ptr, k, j, GROUPS, CPG, JB)
            dx = tl.dot(whitening, scaled.to(OPERAND), dx, input_precision=PRECISION)
            centred = (x.to(tl.float32) - mean[:, None]).to(OPERAND)
            dx = tl.dot(symmetric, centred, dx, input_precision=PRECISION)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        dx -= shift[:, None]
        tl.store(dx_ptr + _offsets(n, rows, j, p, dx_n, dx_outer, CPG, VECTOR, DX_J), dx, mask=inside)


# ---------------------------------------------------------------------------------------- launches


def prepare(x: Tensor) -> Tensor:
    """The input, or a gradient, in a layout that the kernels take: mostly as it is, channels_last too."""
    return x if _strides(x) is not None else x.contiguous()


def portion(x: Tensor, groups: int) -> int:
    """How many samples the backward pass should work on at a time: all."""
    return x.shape[0]


class _Strides(NamedTuple):
    """(N, C, P) with stride 1 for positions or channels."""

    sample: int
    outer: int  # of positions if j_first, else of channels
    j_first: bool


def _strides(x: Tensor) -> _Strides | None:
    try:
        sample, channel, position = x.view(*x.shape[:2], prod(x.shape[2:])).stride()
    except RuntimeError:  # the spatial dimensions do not collapse to one stride
        return None
    alone = x.shape[2:].numel() == 1
    # strides that are never taken say nothing about alignment
    sample, position = 0 if x.shape[0] == 1 else sample, 0 if alone else position
    if channel == 1 and position != 1:
        return _Strides(sample, position, True)
    return _Strides(sample, channel, False) if position == 1 or alone else None


def _arguments(groups: int, columns: int, channels_apart: bool = False, **tensors: Tensor) -> dict[str, Any]:
    """What a launch is told of the tensors that are as large as x, and the tiles in which it works on them.

    The first tensor decides the shape of the tiles, of up to ``columns`` columns.
    """
    arguments: dict[str, Any] = {}
    layouts = []
    for name, tensor in tensors.items():
        strides = _strides(tensor)
        if strides is None:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; prepare() it first"
            )
        layouts.append(strides)
        arguments |= {f"{name}_ptr": tensor, f"{name}_n": strides.sample, f"{name}_outer": strides.outer}
        arguments[f"{name.upper()}_J"] = strides.j_first
    channels, *spatial = next(iter(tensors.values())).shape[1:]
    cpg, positions = channels // groups, prod(spatial)
    vector = gcd(16, *(stride for layout in layouts for stride in layout[:2]))
    if not all(layout.j_first for layout in layouts):
        vector = gcd(vector, positions)
    arguments |= {"GROUPS": groups, "ROWS": _rows(groups), "CPG": cpg, "VECTOR": vector, "positions": positions}
    tiled = 1 if channels_apart else cpg
    jb, pb = triton.next_power_of_2(tiled), triton.next_power_of_2(positions)
    if layouts[0].j_first:  # neighbours in memory first
        jb = min(jb, columns)
        pb = min(pb, columns // jb)
    else:
        pb = min(pb, columns)
        jb = min(jb, columns // pb)
    pb = max(pb, 16 // jb)  # a product is at least 16 deep
    if not channels_apart:
        arguments["JB"] = jb
    return arguments | {"PB": pb, "tiles": triton.cdiv(tiled, jb) * triton.cdiv(positions, pb)}


def _rows(groups: int) -> int:
    """Rows of a padded matrix; products have at least 16."""
    return max(16, triton.next_power_of_2(groups))


def _columns_of(x: Tensor, groups: int) -> int:
    return min(256, max(32, TILE_BYTES // (_rows(groups) * x.element_size())))


def _split(tiles: int, others: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Cuts ``tiles`` so that with ``others`` a multiprocessor has about ``programs``: (cuts, tiles of each)."""
    wanted = triton.cdiv(programs * _processors(device), others)
    per_split = max(MIN_TILES, triton.cdiv(tiles, wanted))
    return triton.cdiv(tiles, per_split), per_split


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _precision(x: Tensor) -> dict[str, Any]:
    """How the products that are as long as ``x`` are taken; see the table at the top."""
    # the interpreter has no bfloat16 products
    operand = tl.bfloat16 if x.dtype == torch.bfloat16 and not _interpreted() else tl.float32
    return {"OPERAND": operand, "PRECISION": "tf32x3" if x.dtype == torch.float32 and not _tf32_allowed() else "tf32"}


def _tf32_allowed() -> bool:
    matmul = torch.backends.cuda.matmul
    chosen = getattr(matmul, "fp32_precision", None)  # newer torch refuses the older name if both have been used
    return bool(matmul.allow_tf32) if chosen is None else chosen == "tf32"


def _launch(kernel: Any, grid: tuple[int, int], like: Tensor, warps: int, stages: int, **arguments: Any) -> None:
    with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
        kernel[grid](**arguments, num_warps=warps, num_stages=stages)


def _empty(like: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _warps(groups: int) -> int:
    return 4 if groups <= 64 else 8  # an accumulator of g rows keeps to the registers


def _held(x: Tensor, groups: int) -> tuple[int, int]:
    """(depth, columns) of products with g x g matrices.

    Matrices of up to 64 rows stay with a program. Larger ones are read in pieces for every tile, which is wider.
    """
    return (_rows(groups), _columns_of(x, groups)) if groups <= 64 else (16, 64)


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The mean (N, g) and the covariance without eps (N, g, g) of every sample of (N, C, *spatial)."""
    n = x.shape[0]
    arguments = _arguments(groups, _columns_of(x, groups), x=x)
    splits, per_split = _split(arguments["tiles"], n, 3, x.device)
    count, shift, offset = _empty(x, n, splits), _empty(x, n, splits, groups), _empty(x, n, splits, groups)
    moment = _empty(x, n, splits, groups, groups)
    mean, covariance = _empty(x, n, groups), _empty(x, n, groups, groups)
    partial = {"count_ptr": count, "shift_ptr": shift, "offset_ptr": offset, "moment_ptr": moment}
    _launch(
        _moments, (n, splits), x, _warps(groups), stages=3, **arguments, **partial,
        per_split=per_split, PRECISION=_precision(x)["PRECISION"],
    )  # fmt: skip
    block = 128  # few enough elements that the merge of even one sample occupies many multiprocessors
    _launch(
        _merge, (n, triton.cdiv(groups * groups, block)), x, warps=4, stages=1, **partial,
        mean_ptr=mean, covariance_ptr=covariance, splits=splits, columns=float(x[0].numel() // groups),
        GROUPS=groups, AT_ONCE=16, BLOCK=block,
    )  # fmt: skip
    return mean, covariance


def newton(sigma: Tensor, num_iters: int) -> Tensor:
    """:func:`gw_detectron.layers.newton_inverse_sqrt` of (N, g, g), in one launch."""
    whitening = torch.empty_like(sigma, memory_format=torch.contiguous_format)
    _launch_newton(sigma, num_iters, 5, grad_ptr=None, whitening_ptr=whitening, grad_sigma_ptr=None)
    return whitening


def newton_backward(sigma: Tensor, grad: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """The whitening matrices again, and the symmetric gradient of the covariance, given that of the matrices."""
    whitening = torch.empty_like(sigma, memory_format=torch.contiguous_format)
    grad_sigma = torch.empty_like(whitening)
    _launch_newton(sigma, num_iters, 10, grad_ptr=grad.contiguous(), whitening_ptr=whitening, grad_sigma_ptr=grad_sigma)
    return whitening, grad_sigma


def _launch_newton(sigma: Tensor, num_iters: int, matrices: int, **arguments: Any) -> None:
    n, groups = sigma.shape[:2]
    rows = _rows(groups)
    programs = min(n, _processors(sigma.device))  # the scratch of more would not stay in the caches
    _launch(
        _newton, (programs, 1), sigma, warps=8, stages=1, sigma_ptr=sigma.contiguous(), **arguments,
        scratch_ptr=_empty(sigma, programs, matrices, rows, rows), samples=n, num_iters=num_iters,
        zero=zero_variance(torch.float32), GROUPS=groups, ROWS=rows, BLOCK=min(rows, 64), DEPTH=16, PRECISION="tf32x3",
    )  # fmt: skip


def apply(x: Tensor, mean: Tensor, whitening: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """Writes ``weight * (whitening @ (x - mean)) + bias`` to ``out``, in one launch."""
    groups = whitening.shape[-1]
    depth, columns = _held(x, groups)
    arguments = _arguments(groups, columns, x=x, y=out)
    splits, per_split = _split(arguments["tiles"], x.shape[0], 3, x.device)
    _launch(
        _apply, (x.shape[0], splits), x, _warps(groups), stages=2, **arguments,
        mean_ptr=mean.contiguous(), whitening_ptr=whitening.contiguous(),
        weight_ptr=None if weight is None else weight.contiguous(),
        bias_ptr=None if bias is None else bias.contiguous(),
        per_split=per_split, DEPTH=depth, **_precision(x),
    )  # fmt: skip


def grad_products(x: Tensor, mean: Tensor, dy: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """``dy_j @ (x_j - mean)^T`` for every channel j of a group, and the sums of ``dy`` over positions.

    Returns:
        (C / g, N, g, g) and (C / g, N, g).
    """
    arguments = _arguments(groups, _columns_of(x, groups), channels_apart=True, x=x, dy=dy)
    n, cpg = x.shape[0], arguments["CPG"]
    splits, per_split = _split(arguments["tiles"], n * cpg, 2, x.device)
    products, sums = _empty(x, cpg, n, splits, groups, groups), _empty(x, cpg, n, splits, groups)
    _launch(
        _products, (n * cpg, splits), x, _warps(groups), 3 if groups <= 64 else 2, **arguments,
        mean_ptr=mean.contiguous(), product_ptr=products, sum_ptr=sums, samples=n, per_split=per_split, **_precision(x),
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
    """Writes ``whitening^T @ (weight * dy) + symmetric @ (x - mean) - shift`` to ``out``, in one launch."""
    groups = whitening.shape[-1]
    depth, columns = _held(x, groups)
    arguments = _arguments(groups, columns, x=x, dy=dy, dx=out)
    splits, per_split = _split(arguments["tiles"], x.shape[0], 2, x.device)
    _launch(
        _apply_backward, (x.shape[0], splits), x, _warps(groups), stages=2, **arguments,
        mean_ptr=mean.contiguous(), whitening_ptr=whitening.contiguous(),
        weight_ptr=None if weight is None else weight.contiguous(),
        symmetric_ptr=symmetric.contiguous(), shift_ptr=shift.contiguous(),
        per_split=per_split, DEPTH=depth, **_precision(x),
    )  # fmt: skip
