"""Device functions of the kernels: offsets, loads and stores of tiles and small matrices.

``tiling.py`` chooses the tiles; its names JB, PB and VECTOR are theirs.
"""

from __future__ import (
    annotations,  # without triton, constexpr is only a name in the signatures
)

from .compiler import constexpr, jit, tl, triton


@jit
def tile_columns(
    tile,
    positions,
    CPG: constexpr,
    JB: constexpr,
    PB: constexpr,
    VECTOR: constexpr,
    J_FIRST: constexpr,
):
    """Return j, p and the mask of a tile's columns; j is a scalar if JB == 1."""
    if not J_FIRST:  # exact; tells the compiler that VECTOR neighbors exist together
        positions = positions // VECTOR * VECTOR

    # tells the compiler that j is 0, hence that neighboring channels are aligned
    if JB >= CPG:
        j = tile * 0
        p = tile * PB
    else:
        p_tiles = tl.cdiv(positions, PB)
        j = tile // p_tiles * JB
        p = tile % p_tiles * PB

    column = tl.arange(0, JB * PB)
    if JB == 1:
        p += column
    elif J_FIRST:
        j += column % JB
        p += column // JB
    else:
        j += column // PB
        p += column % PB

    return j, p, (j < CPG) & (p < positions)


@jit
def sample_ptr(ptr, n, stride, VECTOR: constexpr):
    """Return the pointer to sample n."""
    return ptr + n.to(tl.int64) * (stride // VECTOR * VECTOR)


@jit
def tile_offsets(
    rows, j, p, outer, CPG: constexpr, VECTOR: constexpr, J_FIRST: constexpr
):
    """Return the offsets of a tile's elements in a sample.

    ``outer`` is the stride of p if J_FIRST, else of channels; the other stride is 1. Offsets have
    32 bits, which halves their registers; ``support.MAX_EXTENT`` ensures that they suffice.
    """
    stride = outer // VECTOR * VECTOR
    if J_FIRST:
        row = rows * CPG
        column = p * stride + j
    else:
        row = rows * (stride * CPG)
        column = j * stride + p
    return row[:, None] + column[None, :]


@jit
def load_per_channel(ptr, rows, j, GROUPS: constexpr, CPG: constexpr, JB: constexpr):
    """Load a (C,) parameter for a tile, broadcastable to it."""
    if JB == 1:
        value = tl.load(ptr + rows * CPG + j, mask=rows < GROUPS, other=0.0)[:, None]
    else:
        inside = (rows < GROUPS)[:, None] & (j < CPG)[None, :]
        value = tl.load(ptr + rows[:, None] * CPG + j[None, :], mask=inside, other=0.0)
    return value.to(tl.float32)


@jit
def load_rows(ptr, n, rows, GROUPS: constexpr):
    """Load a part of row n of an (N, g) tensor."""
    return tl.load(ptr + n.to(tl.int64) * GROUPS + rows, mask=rows < GROUPS, other=0.0)


@jit
def load_matrix(ptr, n, rows, columns, GROUPS: constexpr, MORE: constexpr = 0):
    """Load a part of matrix n of an (N, g + MORE, g) tensor."""
    inside = (rows < GROUPS)[:, None] & (columns < GROUPS)[None, :]
    offsets = (
        n.to(tl.int64) * (GROUPS * (GROUPS + MORE))
        + rows[:, None] * GROUPS
        + columns[None, :]
    )
    return tl.load(ptr + offsets, mask=inside, other=0.0)


@jit
def store_matrix(ptr, n, rows, columns, value, GROUPS: constexpr, MORE: constexpr = 0):
    """Store a part of matrix n of an (N, g + MORE, g) tensor."""
    inside = (rows < GROUPS)[:, None] & (columns < GROUPS)[None, :]
    offsets = (
        n.to(tl.int64) * (GROUPS * (GROUPS + MORE))
        + rows[:, None] * GROUPS
        + columns[None, :]
    )
    tl.store(ptr + offsets, value, mask=inside)


@jit
def round_tf32(x):
    """Round to tf32, to nearest.

    Hopper's tensor cores would cut the 13 low bits of an operand off.
    """
    rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(
        tl.float32, bitcast=True
    )
    return tl.where(x == x, rounded, x)  # the sum would turn a NaN into -0


@jit
def to_operand(x, OPERAND: constexpr, PRECISION: constexpr):
    """Return the operand of a product; tf32x3 rounds its operands itself."""
    if OPERAND == tl.float32 and PRECISION == "tf32":
        return round_tf32(x)
    else:
        return x.to(OPERAND)


@jit
def split_tf32(x):
    """Return high, which is x rounded to tf32, and low = x - high."""
    high = round_tf32(x)
    return high, x - high


@jit
def half_scale(bound):
    """Return a power of two that brings values up to ``bound`` below 2^15, and its inverse.

    It is at most 2^126.
    """
    exponent = tl.minimum(tl.maximum(bound.to(tl.int32, bitcast=True) >> 23, 15), 254)
    scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@jit
def split_half(x):
    """Return two float16 for a float32 below 2^15: x = high + low / 2048."""
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)) * 2048
    return high, low.to(tl.float16)


@jit
def multiply_half(a_high, a_low, b_high, b_low):
    """Compute a b in float32 precision by three products in float16 (Ootomo and Yokota, 2022)."""
    rest = tl.dot(a_high, b_low) + tl.dot(a_low, b_high)
    return tl.dot(a_high, b_high) + rest * (1 / 2048)


@jit
def input_scale(sigma_ptr, n, rows, columns, GROUPS: constexpr):
    """Return the power of two for the centered input of sample n, and its inverse.

    |x - mean|^2 <= M tr Sigma in every element.
    """
    diagonal = tl.load(
        sigma_ptr + n.to(tl.int64) * (GROUPS * GROUPS) + rows * (GROUPS + 1),
        mask=rows < GROUPS,
        other=0.0,
    )
    # W is zero below (zero_variance_threshold)
    trace = tl.maximum(tl.sum(diagonal, 0), 1e-19)
    return half_scale(tl.sqrt(trace) * tl.sqrt(columns))


@jit
def split_matrix(matrix):
    """Return two float16 for the scaled matrix, and the inverse of its scale."""
    scale, inverse = half_scale(tl.max(tl.max(tl.abs(matrix), 1), 0))
    high, low = split_half(matrix * scale)
    return high, low, inverse


#: whether Triton runs the kernels in its interpreter, on the CPU; a constant, which torch.compile can
#: trace
INTERPRETED = triton is not None and not isinstance(tile_columns, triton.JITFunction)
