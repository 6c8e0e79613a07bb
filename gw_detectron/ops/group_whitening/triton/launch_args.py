"""What a launch is told of its tensors, and how the work is cut into programs."""

from contextlib import nullcontext
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compiler import tl, triton
from .tiles import tile_columns

#: beyond, the covariance of a program does not fit its registers
MAX_GROUPS = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: bytes of x in a tile: small enough that a multiprocessor holds several programs, so that some load while others
#: multiply, and still 128 bytes in a row of float32 with g = 64
TILE_BYTES = 8192
#: elements from the first to the last of a sample; beyond, offsets in it would not fit 32 bits
MAX_EXTENT = 2**31
#: tiles of a program that writes a partial g x g result or reads a g x g matrix; with g = 64 one weighs two tiles
MIN_TILES = 4


def supported(x: Tensor, groups: int) -> bool:
    """Whether these kernels take ``x`` (N, C, \\*spatial) in ``groups`` groups: by device, dtype, size and groups."""
    return (
        triton is not None
        and (_interpreted() or _has_tensor_cores(x.device))
        and 1 <= groups <= MAX_GROUPS
        and x.dtype in DTYPES
        and prod(x.shape[1:]) < MAX_EXTENT
    )


def _interpreted() -> bool:
    """Whether Triton's interpreter, chosen when triton is imported, runs the kernels (on the CPU)."""
    return triton is not None and not isinstance(tile_columns, triton.JITFunction)


def _has_tensor_cores(device: torch.device) -> bool:
    """For tf32 and bfloat16: NVIDIA's from Ampere on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def prepare(x: Tensor) -> Tensor:
    """A tensor as large as the input in a layout that the kernels take: mostly as it is, channels_last too."""
    return x if _strides(x) is not None and _strides(torch.empty_like(x)) is not None else x.contiguous()


def portion(x: Tensor, groups: int) -> int:
    """How many samples the backward pass should work on at a time: all."""
    return x.shape[0]


def laid_out_as(like: Tensor, y: Tensor) -> Tensor:
    """The values of ``y`` with the strides of ``like``: mostly as it is."""
    return y if y.stride() == like.stride() else torch.empty_like(like).copy_(y)


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
    channels, positions = x.shape[1], x.shape[2:].numel()
    if (channels - 1) * channel + (positions - 1) * position >= MAX_EXTENT:
        return None
    alone = positions == 1
    # strides that are never taken say nothing about alignment
    sample, position = 0 if x.shape[0] == 1 else sample, 0 if alone else position
    if channel == 1 and position != 1:
        return _Strides(sample, position, True)
    return _Strides(sample, channel, False) if position == 1 or alone else None


def arguments_of(groups: int, columns: int, channels_apart: bool = False, **tensors: Tensor) -> dict[str, Any]:
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
    arguments |= {"GROUPS": groups, "ROWS": padded_rows(groups), "CPG": cpg, "VECTOR": vector, "positions": positions}
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


def padded_rows(groups: int) -> int:
    """Rows of a padded matrix; products have at least 16."""
    return max(16, triton.next_power_of_2(groups))


def columns_of(x: Tensor, groups: int, tile_bytes: int = TILE_BYTES) -> int:
    """Columns of a tile of g rows."""
    return min(256, max(32, tile_bytes // (padded_rows(groups) * x.element_size())))


def split(tiles: int, others: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Cuts ``tiles`` so that with ``others`` a multiprocessor has about ``programs``: (cuts, tiles of each)."""
    wanted = triton.cdiv(programs * processors(device), others)
    per_split = max(MIN_TILES, triton.cdiv(tiles, wanted))
    return triton.cdiv(tiles, per_split), per_split


def processors(device: torch.device) -> int:
    """The multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def precision(x: Tensor) -> dict[str, Any]:
    """How the products that are as long as ``x`` are taken; see the table at the head of the package."""
    # the interpreter has no bfloat16 products
    operand = tl.bfloat16 if x.dtype == torch.bfloat16 and not _interpreted() else tl.float32
    return {"OPERAND": operand, "PRECISION": "tf32x3" if x.dtype == torch.float32 and not _tf32_allowed() else "tf32"}


def _tf32_allowed() -> bool:
    matmul = torch.backends.cuda.matmul
    chosen = getattr(matmul, "fp32_precision", None)  # newer torch refuses the older name if both have been used
    return bool(matmul.allow_tf32) if chosen is None else chosen == "tf32"


def run(kernel: Any, grid: tuple[int, int], like: Tensor, warps: int, stages: int, **arguments: Any) -> None:
    """Launches a kernel on the device of ``like``."""
    with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
        kernel[grid](**arguments, num_warps=warps, num_stages=stages)


def empty(like: Tensor, *size: int) -> Tensor:
    """An uninitialised float32 tensor on the device of ``like``."""
    return torch.empty(size, dtype=torch.float32, device=like.device)


def warps_of(groups: int) -> int:
    """So many that an accumulator of g rows keeps to the registers."""
    return 4 if groups <= 64 else 8


def held(x: Tensor, groups: int) -> tuple[int, int]:
    """(depth, columns) of products with g x g matrices.

    Matrices of up to 64 rows stay with a program. Larger ones are read in pieces for every tile, which is wider.
    """
    return (padded_rows(groups), columns_of(x, groups)) if groups <= 64 else (16, 64)
