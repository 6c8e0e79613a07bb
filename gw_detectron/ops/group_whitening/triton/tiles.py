"""Tiles of columns and small matrices: their offsets, and how kernels load and store them."""
# mypy: disallow-untyped-defs=False
# (the parameters of a kernel get their types at its launch)

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

from .compiler import constexpr, jit, tl


@jit
def tile_columns(tile, positions, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr, J_FIRST: constexpr):
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


@jit
def of_sample(ptr, n, stride, VECTOR: constexpr):
    """Where sample n of a tensor begins."""
    return ptr + n.to(tl.int64) * (stride // VECTOR * VECTOR)  # not stride.to(): Triton makes a constant of a 1


@jit
def tile_offsets(rows, j, p, outer, CPG: constexpr, VECTOR: constexpr, J_FIRST: constexpr):
    """Offsets of a tile's elements in a sample; ``outer`` is the stride of p if J_FIRST, else of channels, the other 1.

    They have 32 bits, which takes half the registers; ``launch`` sees that they suffice.
    """
    stride = outer // VECTOR * VECTOR
    if J_FIRST:
        row, column = rows * CPG, p * stride + j
    else:
        row, column = rows * (stride * CPG), j * stride + p
    return row[:, None] + column[None, :]


@jit
def load_per_channel(ptr, rows, j, GROUPS: constexpr, CPG: constexpr, JB: constexpr):
    """A parameter of shape (C,) for the channels of a tile, to broadcast against it."""
    if JB == 1:
        value = tl.load(ptr + rows * CPG + j, mask=rows < GROUPS, other=0.0)[:, None]
    else:
        inside = (rows < GROUPS)[:, None] & (j < CPG)[None, :]
        value = tl.load(ptr + rows[:, None] * CPG + j[None, :], mask=inside, other=0.0)
    return value.to(tl.float32)


@jit
def load_rows(ptr, n, rows, GROUPS: constexpr):
    """A part of row n of an (N, g) tensor."""
    return tl.load(ptr + n.to(tl.int64) * GROUPS + rows, mask=rows < GROUPS, other=0.0)


@jit
def load_matrix(ptr, n, rows, columns, GROUPS: constexpr):
    """A part of matrix n of an (N, g, g) tensor."""
    inside = (rows < GROUPS)[:, None] & (columns < GROUPS)[None, :]
    offsets = n.to(tl.int64) * (GROUPS * GROUPS) + rows[:, None] * GROUPS + columns[None, :]
    return tl.load(ptr + offsets, mask=inside, other=0.0)


@jit
def store_matrix(ptr, n, rows, columns, value, GROUPS: constexpr):
    inside = (rows < GROUPS)[:, None] & (columns < GROUPS)[None, :]
    offsets = n.to(tl.int64) * (GROUPS * GROUPS) + rows[:, None] * GROUPS + columns[None, :]
    tl.store(ptr + offsets, value, mask=inside)
