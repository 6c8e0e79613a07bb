"""Launches: strides, tile sizes, number of programs."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import MissingPackageError
from .compiler import ERRORS, VERSION, tl, triton
from .tiles import tile_columns

#: with more groups, the covariance of a program does not fit its registers
MAX_GROUPS = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: limit of the distance between two elements of a sample; kernels compute offsets in 32 bits
MAX_EXTENT = 2**31
#: most programs in the second dimension of a grid (CUDA programming guide, technical specifications)
_MAX_GRID = 65535
#: compute capability -> first version of Triton that compiles for it; older ones raise or abort the process
_FIRST_VERSION = {(10, 3): (3, 6), (11, 0): (3, 8), (12, 1): (3, 6)}
#: multiprocessors of a device that is not there (meta tensors): those of an H100
_META_PROCESSORS = 132


class Tuning(NamedTuple):
    """Numbers that change the speed of launches, and their results by rounding alone.

    Args:
        tile_bytes: of x in a tile. A multiprocessor holds several programs of this size: some load while others
            multiply. A row of float32 with g = 64 still has 128 bytes.
        min_tiles: fewest tiles per program. Each program also reads or writes a g x g matrix, at g = 64 as many bytes
            as two tiles.
        max_tiles: most tiles per program of the statistics. Tensor cores round the sums of a program toward zero, so
            its error grows with them: at 64 tiles to about 1e-5 of the largest variance.
    """

    tile_bytes: int = 8192
    min_tiles: int = 4
    max_tiles: int = 64


class Launch(NamedTuple):
    """A launch of a kernel on the device of ``like``."""

    kernel: Any
    grid: tuple[int, int]
    like: Tensor
    warps: int
    stages: int
    arguments: dict[str, Any]

    def run(self) -> None:
        with torch.cuda.device(self.like.device) if self.like.is_cuda else nullcontext():
            try:
                self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)
            except ERRORS as error:
                if "C compiler" in str(error):
                    raise MissingPackageError(
                        f"Triton ({triton.__version__}): finds no C compiler, with which it builds its launcher. "
                        "Fix: install gcc, or set the environment variable GW_DETECTRON_KERNELS=matmul."
                    ) from error
                raise


_tuning = Tuning()
_recorded: list[Launch] | None = None
_executed = True


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Launch with other numbers, to measure them."""
    global _tuning
    before, _tuning = _tuning, tuning
    try:
        yield
    finally:
        _tuning = before


@contextmanager
def recorded(*, execute: bool = True) -> Iterator[list[Launch]]:
    """Collect the launches, and run them if ``execute``.

    Those of meta tensors are only collected, for a device of 132 multiprocessors.
    """
    global _recorded, _executed
    before, _recorded, _executed = (_recorded, _executed), [], execute
    try:
        yield _recorded
    finally:
        _recorded, _executed = before


def supported(x: Tensor, groups: int) -> bool:
    """Whether the kernels accept the device, dtype, size and groups."""
    return (
        triton is not None
        and (_interpreted() or compiles_for(x.device))
        and 1 <= groups <= MAX_GROUPS
        and x.dtype in DTYPES
        and prod(x.shape[1:]) < MAX_EXTENT
    )


def _interpreted() -> bool:
    """Whether Triton was imported with its interpreter, which runs on CPU."""
    return triton is not None and not isinstance(tile_columns, triton.JITFunction)


def compiles_for(device: torch.device) -> bool:
    """Whether this Triton compiles the kernels for a device: NVIDIA from Ampere on, which multiplies tf32."""
    # fake tensors may be on a GPU that is not there
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and _FIRST_VERSION.get(capability, VERSION) <= VERSION


def prepare(x: Tensor) -> Tensor:
    """Return ``x`` if its strides are accepted (channels_last too), else a copy."""
    accepted = _strides(x) is not None and _strides(torch.empty_like(x, device="meta")) is not None
    return x if accepted else x.contiguous()


def samples_per_pass(x: Tensor, groups: int) -> int:
    """Return the number of all samples."""
    return x.shape[0]


class Strides(NamedTuple):
    """Strides of an activation (N, C, P); C or P has stride 1."""

    sample: int
    outer: int  # of positions if j_first, else of channels
    j_first: bool  # channels have stride 1


def _strides(x: Tensor) -> Strides | None:
    """Return the strides of ``x``, or None if they are not accepted."""
    try:
        sample, channel, position = x.view(*x.shape[:2], prod(x.shape[2:])).stride()
    except RuntimeError:  # the spatial dimensions do not collapse to one stride
        return None
    channels, positions = x.shape[1], x.shape[2:].numel()
    if (channels - 1) * channel + (positions - 1) * position >= MAX_EXTENT:
        return None
    alone = positions == 1
    # the stride of a dimension of size 1 tells nothing about alignment
    sample, position = 0 if x.shape[0] == 1 else sample, 0 if alone else position
    if channel == 1 and position != 1:
        return Strides(sample, position, True)
    return Strides(sample, channel, False) if position == 1 or alone else None


class Tiling(NamedTuple):
    """Tiles of activations; fields named as the kernels' parameters."""

    rows: int  # g, padded
    cpg: int
    positions: int
    vector: int  # power of two that divides all strides and, unless j_first, the positions
    jb: int
    pb: int
    tiles: int  # per sample, or per channel of a group if a program works on one j


def layouts(groups: int, columns: int, *tensors: Tensor, one_j: bool = False) -> tuple[Tiling, list[Strides]]:
    """Return the tiling of activations of one shape, and their strides.

    Tiles have at most ``columns`` columns. The first tensor decides the shape of the tiles. With ``one_j`` a tile has a
    single j.
    """
    strides = []
    for tensor in tensors:
        found = _strides(tensor)
        if found is None:
            raise ValueError(
                f"strides {tensor.stride()} of shape {tuple(tensor.shape)}: unsupported. Fix: call prepare(x) first."
            )
        strides.append(found)
    channels, *spatial = tensors[0].shape[1:]
    cpg, positions = channels // groups, prod(spatial)
    vector = gcd(16, *(stride for each in strides for stride in each[:2]))
    if not all(each.j_first for each in strides):
        vector = gcd(vector, positions)
    tiled = 1 if one_j else cpg
    jb, pb = triton.next_power_of_2(tiled), triton.next_power_of_2(positions)
    if strides[0].j_first:  # neighbors in memory first
        jb = min(jb, columns)
        pb = min(pb, columns // jb)
    else:
        pb = min(pb, columns)
        jb = min(jb, columns // pb)
    pb = max(pb, 16 // jb)  # tl.dot needs a depth of at least 16
    tiles = triton.cdiv(tiled, jb) * triton.cdiv(positions, pb)
    return Tiling(padded_rows(groups), cpg, positions, vector, jb, pb, tiles), strides


def padded_rows(groups: int) -> int:
    """Return the rows of a padded matrix; tl.dot needs at least 16."""
    return max(16, triton.next_power_of_2(groups))


def tile_columns_for(x: Tensor, groups: int, tensors: int = 1) -> int:
    """Return the columns of a tile of about ``tile_bytes / tensors`` bytes."""
    return min(256, max(32, _tuning.tile_bytes // tensors // (padded_rows(groups) * x.element_size())))


def matrix_tiles(x: Tensor, groups: int) -> tuple[int, int]:
    """Return (depth, columns) of products with g x g matrices.

    Up to 64 groups a program keeps the matrices in registers. Larger ones are read in slices of ``depth`` columns for
    every tile, and the tiles are wider.
    """
    return (padded_rows(groups), tile_columns_for(x, groups)) if groups <= 64 else (16, 64)


def split(tiles: int, others: int, programs: int, device: torch.device, *, limited: bool = False) -> tuple[int, int]:
    """Split ``tiles`` so that each multiprocessor gets about ``programs`` programs.

    Args:
        tiles: the tiles of a row of programs.
        others: the number of rows of programs.
        programs: wanted per multiprocessor.
        device: of the launch.
        limited: whether ``max_tiles`` limits the tiles of a split, as far as the grid allows.

    Returns:
        The number of splits, and the tiles of each.
    """
    wanted = triton.cdiv(programs * processors(device), others)
    per_split = max(_tuning.min_tiles, triton.cdiv(tiles, wanted))
    if limited:
        per_split = max(min(per_split, _tuning.max_tiles), triton.cdiv(tiles, _MAX_GRID))
    return triton.cdiv(tiles, per_split), per_split


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _META_PROCESSORS if device.type == "meta" else 1


def operand_dtype(x: Tensor) -> Any:
    """Return OPERAND, the dtype of operands (table in ``triton/__init__.py``)."""
    # the interpreter has no bfloat16 products
    return tl.bfloat16 if x.dtype == torch.bfloat16 and not _interpreted() else tl.float32


def input_precision(x: Tensor) -> str:
    """Return PRECISION, the ``input_precision`` of products over columns."""
    return "tf32x3" if x.dtype == torch.float32 and not tf32_allowed(torch.backends.cuda.matmul) else "tf32"


def tf32_allowed(backend: Any) -> bool:
    """Whether a backend of torch, such as ``torch.backends.cuda.matmul``, may multiply float32 in tf32."""
    chosen = getattr(backend, "fp32_precision", None)  # newer torch refuses the older name if both have been used
    return bool(backend.allow_tf32) if chosen is None else chosen == "tf32"


def warps_for(groups: int) -> int:
    """Return the warps that keep an accumulator of g rows in registers."""
    return 4 if groups <= 64 else 8


def empty(like: Tensor, *size: int) -> Tensor:
    """Return an uninitialized float32 tensor on the device of ``like``."""
    return torch.empty(size, dtype=torch.float32, device=like.device)


def run(kernel: Any, grid: tuple[int, int], like: Tensor, warps: int, stages: int, **arguments: Any) -> None:
    """Launch a kernel on the device of ``like``."""
    launch = Launch(kernel, grid, like, warps, stages, arguments)
    if _recorded is not None:
        _recorded.append(launch)
    if _executed and not like.is_meta:
        launch.run()
