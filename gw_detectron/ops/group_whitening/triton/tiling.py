"""Strides, tiles and programs of the kernels over activations, and their tuned numbers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import plans, support
from .compiler import triton

#: most programs in the second dimension of a grid (CUDA programming guide, technical
#: specifications)
_MAX_GRID = 65535


class Setting(NamedTuple):
    """Launch parameters of a kernel over activations; they change its results only by rounding."""

    #: that share a multiprocessor: some load while others multiply
    programs: int
    #: of the pipelined loop over tiles
    stages: int
    #: of x in a tile: 128 of each row of float32 with g = 64
    tile_bytes: int = 8192
    #: of a program, which also moves a g x g matrix: at g = 64 the bytes of two tiles
    min_tiles: int = 4


class Tuning(NamedTuple):
    """Settings of the kernels over activations, by their names."""

    moments: Setting = Setting(3, 3)
    apply: Setting = Setting(3, 2)
    products: Setting = Setting(2, 3)
    apply_backward: Setting = Setting(2, 2)
    #: of a program of the moments. Tensor cores round its sums toward zero: by 1e-5 of the largest
    #: variance at 64
    max_tiles: int = 64


#: settings on Hopper: the fastest of 42 for each kernel on an H200, over five shapes. Not tuned:
#: float16, where two programs of apply_backward fit the shared memory, and two tiles per program,
#: which keep all processors busy with two samples of 25 x 42.
HOPPER = {
    torch.float32: Tuning(
        moments=Setting(2, 3, 16384),
        apply=Setting(3, 3, 16384, min_tiles=2),
        products=Setting(2, 3),
        apply_backward=Setting(2, 3, 16384, min_tiles=2),
    ),
    torch.bfloat16: Tuning(
        moments=Setting(3, 3),
        apply=Setting(4, 3, min_tiles=2),
        products=Setting(2, 3),
        apply_backward=Setting(3, 3, min_tiles=2),
    ),
    torch.float16: Tuning(
        moments=Setting(3, 3),
        apply=Setting(4, 3, min_tiles=2),
        products=Setting(2, 3),
        apply_backward=Setting(2, 3, min_tiles=2),
    ),
}

_tuning: Tuning | None = None


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Launch with other numbers, to measure them."""
    global _tuning
    before = _tuning
    _tuning = tuning
    plans.forget()
    try:
        yield
    finally:
        _tuning = before
        plans.forget()


def tuning_for(x: Tensor) -> Tuning:
    """Return the settings for the dtype of ``x``."""
    if _tuning is not None:
        return _tuning
    return HOPPER[x.dtype] if support.is_hopper(x) else Tuning()


class Strides(NamedTuple):
    """Strides of an activation (N, C, P); C or P has stride 1."""

    sample: int
    #: of positions if j_first, else of channels
    outer: int
    #: whether neighboring channels are neighbors in memory (channels_last), rather than positions
    j_first: bool


def prepare(x: Tensor) -> Tensor:
    """Return ``x`` if its strides are accepted (channels_last too), else a copy."""
    if x.is_contiguous() or _strides(x) is not None:
        return x
    return x.contiguous()


def _strides(x: Tensor) -> Strides | None:
    """Return the strides of ``x``, or None if they are not accepted."""
    n, channels, *spatial = x.shape
    positions = prod(spatial)
    try:
        of_sample, of_channel, of_position = x.view(n, channels, positions).stride()
    except RuntimeError:  # the spatial dimensions do not collapse to one stride
        return None

    extent = (channels - 1) * of_channel + (positions - 1) * of_position
    if extent >= support.MAX_EXTENT:
        return None

    # the stride of a dimension of size 1 tells nothing about alignment
    if n == 1:
        of_sample = 0
    if positions == 1:
        of_position = 0

    if of_channel == 1 and of_position != 1:
        return Strides(of_sample, of_position, j_first=True)
    if of_position == 1 or positions == 1:
        return Strides(of_sample, of_channel, j_first=False)
    return None


def padded_rows(groups: int) -> int:
    """Return the rows of a padded matrix; tl.dot needs at least 16."""
    return max(16, triton.next_power_of_2(groups))


def over_columns(
    setting: Setting,
    groups: int,
    matrix: bool = False,
    one_j: bool = False,
    limited: bool = False,
    **tensors: Tensor,
) -> tuple[int, dict[str, Any]]:
    """Divide activations of one shape into tiles of all groups, and the tiles among programs.

    Args:
        setting: of the kernel.
        groups: g.
        matrix: g x g matrices are multiplied with the tiles. Up to 64 groups a program keeps the
            matrices. Larger ones are read in slices of DEPTH columns for every tile.
        one_j: a program works on a single j.
        limited: to ``max_tiles`` of a program, as far as the grid allows.
        tensors: by the names of the kernel's parameters. The first decides which columns are
            neighbors.

    Returns:
        The number of splits of a sample (or of a j), and the arguments of ``plans.run`` that
        follow.
    """
    x = next(iter(tensors.values()))
    n, channels, *spatial = x.shape
    cpg = channels // groups
    positions = prod(spatial)
    rows = padded_rows(groups)
    sliced = matrix and groups > 64

    # of prepared tensors, which are not None
    strides: dict[str, Any] = {
        name: _strides(tensor) for name, tensor in tensors.items()
    }
    vector = _vector(strides.values(), positions)
    neighbors_first = next(iter(strides.values())).j_first

    columns = min(256, max(32, setting.tile_bytes // (rows * x.element_size())))
    tiled = 1 if one_j else cpg
    jb, pb = _tile(tiled, positions, 64 if sliced else columns, neighbors_first)
    tiles = triton.cdiv(tiled, jb) * triton.cdiv(positions, pb)

    grid_rows = n * cpg if one_j else n
    per_split = _tiles_per_program(setting, tiles, grid_rows, x, matrix and jb > 1)
    if limited:
        per_split = min(per_split, tuning_for(x).max_tiles)
        per_split = max(per_split, triton.cdiv(tiles, _MAX_GRID))
    splits = triton.cdiv(tiles, per_split)

    # a single stage where elements would be copied asynchronously one by one
    stages = 1 if vector * x.element_size() < 8 else setting.stages

    arguments = {
        "grid": (grid_rows, splits), "like": x, "warps": 4 if groups <= 64 else 8, "stages": stages,
        "positions": positions, "tiles": tiles, "per_split": per_split,
        "GROUPS": groups, "ROWS": rows, "CPG": cpg, "JB": jb, "PB": pb, "VECTOR": vector,
        "PRECISION": support.input_precision(x),
    }  # fmt: skip
    for name, tensor in tensors.items():
        arguments[f"{name}_ptr"] = tensor
        arguments[f"{name}_n"] = strides[name].sample
        arguments[f"{name}_outer"] = strides[name].outer
        arguments[f"{name.upper()}_J"] = strides[name].j_first
    if matrix:
        arguments["columns"] = float(x[0].numel() // groups)
        arguments["DEPTH"] = 16 if sliced else rows
        arguments["HALVES"] = support.in_halves(x, groups)
        arguments["OPERAND"] = support.operand_dtype(x)
    return splits, arguments


def _vector(strides: Iterable[Strides], positions: int) -> int:
    """Return VECTOR: a power of two that divides all strides and, unless j_first, the positions."""
    vector = 16
    for sample, outer, j_first in strides:
        vector = gcd(vector, sample, outer)
        if not j_first:
            vector = gcd(vector, positions)
    return vector


def _tile(
    channels: int, positions: int, columns: int, j_first: bool
) -> tuple[int, int]:
    """Return JB and PB, the channels and positions of a tile of at most ``columns``."""
    jb = triton.next_power_of_2(channels)
    pb = triton.next_power_of_2(positions)
    if j_first:  # neighbors in memory first
        jb = min(jb, columns)
        pb = min(pb, columns // jb)
    else:
        pb = min(pb, columns)
        jb = min(jb, columns // pb)

    pb = max(pb, 16 // jb)  # tl.dot needs a depth of at least 16
    return jb, pb


def _tiles_per_program(
    setting: Setting, tiles: int, grid_rows: int, x: Tensor, spans_channels: bool
) -> int:
    """Return the tiles of a program, for one wave of programs.

    Each multiprocessor gets at most about ``setting.programs`` programs. A few more would run by
    themselves after all others, and double the time. If tiles span several j, the weights take the
    registers of a fourth program.
    """
    programs = min(setting.programs, 3) if spans_channels else setting.programs
    in_row = programs * support.processors(x.device) // grid_rows
    return max(setting.min_tiles, triton.cdiv(tiles, max(1, in_row)))
