"""Launches: supported inputs, strides, tiles, number of programs, and plans that repeat them cheaply."""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import MissingPackageError
from .compiler import ERRORS, VERSION, tl, triton
from .tiles import INTERPRETED

#: with more groups, the covariance of a program does not fit its registers
MAX_GROUPS = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: limit of the distance between two elements of a sample. Kernels compute offsets in 32 bits, also those of masked
#: columns, which lie up to a tile behind the last element.
MAX_EXTENT = 2**31 - 2**16
#: most programs in the second dimension of a grid (CUDA programming guide, technical specifications)
_MAX_GRID = 65535
#: compute capability -> first version of Triton whose code is right. Older ones raise, abort the process, or race:
#: Triton 3.6 on sm_100 (triton-lang/triton#9871). On sm_103, 3.7 still does (#10590), and nobody has run a later one.
_FIRST_VERSION = {(10, 0): (3, 7), (10, 3): (99,), (11, 0): (3, 8), (12, 1): (3, 6)}
#: multiprocessors of a device that is not there (meta tensors): those of an H100
_META_PROCESSORS = 132
#: plans kept before all are dropped; multi-scale training has hundreds of input shapes
_MOST_PLANS = 8192


class Setting(NamedTuple):
    """Launch parameters of a kernel over activations; they change its results only by rounding."""

    programs: int  # that share a multiprocessor: some load while others multiply
    stages: int  # of the pipelined loop over tiles
    tile_bytes: int = 8192  # of x in a tile: 128 of each row of float32 with g = 64
    min_tiles: int = (
        4  # of a program, which also moves a g x g matrix: at g = 64 the bytes of two tiles
    )


class Tuning(NamedTuple):
    """Settings of the kernels over activations, by their names."""

    moments: Setting = Setting(3, 3)
    apply: Setting = Setting(3, 2)
    products: Setting = Setting(2, 3)
    apply_backward: Setting = Setting(2, 2)
    #: of a program of the moments. Tensor cores round its sums toward zero: by 1e-5 of the largest variance at 64
    max_tiles: int = 64


#: settings on Hopper: the fastest of 42 for each kernel on an H200, over five shapes. Not tuned: float16, where two
#: programs of apply_backward fit the shared memory, and two tiles per program, which keep all processors busy with two
#: samples of 25 x 42.
HOPPER = {
    torch.float32: Tuning(
        Setting(2, 3, 16384),
        Setting(3, 3, 16384, min_tiles=2),
        Setting(2, 3),
        Setting(2, 3, 16384, min_tiles=2),
    ),
    torch.bfloat16: Tuning(
        Setting(3, 3), Setting(4, 3, min_tiles=2), Setting(2, 3), Setting(3, 3, min_tiles=2)
    ),
    torch.float16: Tuning(
        Setting(3, 3), Setting(4, 3, min_tiles=2), Setting(2, 3), Setting(2, 3, min_tiles=2)
    ),
}


class Launch(NamedTuple):
    """A launch of a kernel on the device of ``like``."""

    kernel: Any
    grid: tuple[int, int]
    like: Tensor
    warps: int
    stages: int
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Launch, and return the compiled kernel (None in the interpreter)."""
        with torch.cuda.device(self.like.device) if self.like.is_cuda else nullcontext():
            try:
                return self.kernel[self.grid](
                    **self.arguments, num_warps=self.warps, num_stages=self.stages
                )
            except ERRORS as error:
                if "C compiler" in str(error):
                    raise MissingPackageError(
                        f"Triton ({triton.__version__}): finds no C compiler to build its launcher. "
                        "Fix: install gcc, or set the environment variable GW_DETECTRON_KERNELS=matmul."
                    ) from error
                raise


class Recording:
    """The launches of a pass, their compiled kernels and their scratch tensors."""

    def __init__(self, execute: bool) -> None:
        self.execute = execute
        self.launches: list[Launch] = []
        self.compiled: list[Any] = []
        self.scratch: list[Tensor] = []


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()
_tuning: Tuning | None = None
_plans: dict[Hashable, "_Plan"] = {}


@contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Launch with other numbers, to measure them."""
    global _tuning
    before, _tuning = _tuning, tuning
    _plans.clear()
    try:
        yield
    finally:
        _tuning = before
        _plans.clear()


@contextmanager
def recorded(*, execute: bool = True) -> Iterator[Recording]:
    """Collect the launches of this thread, and run them if ``execute``.

    Those of meta tensors are only collected, for a device of 132 multiprocessors.
    """
    before, _current.recording = _current.recording, Recording(execute)
    try:
        yield _current.recording
    finally:
        _current.recording = before


class _Plan:
    """Launches of compiled kernels with all arguments but the addresses of tensors.

    The host time of a layer is that of its launches: Triton binds, specializes and looks up 25 arguments in each of
    them. A plan does this once per shape, stride, dtype and alignment.
    """

    def __init__(self, recording: Recording, tensors: Sequence[Tensor | None]) -> None:
        places = {id(tensor): (number, 0) for number, tensor in enumerate(tensors)}
        self.scratch_bytes, offsets = 0, {}
        for tensor in recording.scratch:  # one allocation for all, each aligned as torch's own
            offsets[tensor.data_ptr()] = len(tensors), self.scratch_bytes
            self.scratch_bytes += -(-tensor.nbytes // 256) * 256

        def place(tensor: Tensor) -> tuple[int, int]:
            return places.get(id(tensor)) or offsets[tensor.data_ptr()]

        self.launches = []
        for launch, compiled in zip(recording.launches, recording.compiled, strict=True):
            arguments = [launch.arguments[name] for name in launch.kernel.arg_names]
            slots = [
                (i, *place(value))
                for i, value in enumerate(arguments)
                if isinstance(value, Tensor)
            ]
            for i, *_ in slots:
                arguments[i] = 0
            self.launches.append((compiled[(*launch.grid, 1)], arguments, slots))

    def run(self, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        addresses.append(scratch.data_ptr())
        driver = triton.runtime.driver.active
        with (
            nullcontext()
            if driver.get_current_device() == device.index
            else torch.cuda.device(device)
        ):
            stream = driver.get_current_stream(device.index)
            for launch, arguments, slots in self.launches:
                arguments = arguments.copy()  # other threads run the same plan
                for i, number, offset in slots:
                    arguments[i] = addresses[number] + offset
                launch(*arguments, stream=stream)


def run_planned(
    key: Hashable, tensors: Sequence[Tensor | None], steps: Callable[[], None]
) -> None:
    """Run ``steps``, or repeat the launches that it made for the same ``key``.

    Args:
        key: tells apart all that the launches depend on, except device, precision and addresses of tensors. None if
            ``steps`` calls other operations than ``run``.
        tensors: all that the kernels read and write, x first, besides the tensors that ``empty`` makes.
        steps: calls ``run`` for each launch.
    """
    x = tensors[0]
    assert x is not None
    given = [id(t) for t in tensors if t is not None]
    repeated = len(set(given)) < len(
        given
    )  # a plan could not tell which of them a kernel reads
    if key is None or repeated or not _compiled_for(x.device) or _current.recording is not None:
        return steps()
    aligned = (None if t is None else t.data_ptr() % 16 == 0 for t in tensors)
    key = key, x.device, input_precision(x), *aligned
    plan = _plans.get(key)
    if plan is not None:
        return plan.run(tensors, x.device)
    with recorded() as recording:
        steps()
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = _Plan(recording, tensors)


def _compiled_for(device: torch.device) -> bool:
    return device.type == "cuda" and not INTERPRETED


def layout_key(*tensors: Tensor | None) -> Hashable:
    """Return what a launch depends on in its tensors, besides their addresses."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors)


def supported(x: Tensor, groups: int) -> bool:
    """Whether the kernels accept the device, dtype, size and groups."""
    return (
        triton is not None
        and (INTERPRETED or compiles_for(x.device))
        and 1 <= groups <= MAX_GROUPS
        and x.dtype in DTYPES
        and prod(x.shape[1:]) < MAX_EXTENT
    )


def compiles_for(device: torch.device) -> bool:
    """Whether this Triton compiles the kernels for a device: NVIDIA from Ampere on, which multiplies tf32."""
    # fake tensors may be on a GPU that is not there
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and _FIRST_VERSION.get(capability, VERSION) <= VERSION


def prepare(x: Tensor) -> Tensor:
    """Return ``x`` if its strides are accepted (channels_last too), else a copy."""
    return x if x.is_contiguous() or _strides(x) is not None else x.contiguous()


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


def over_columns(
    setting: Setting,
    groups: int,
    matrix: bool = False,
    one_j: bool = False,
    limited: bool = False,
    **tensors: Tensor,
) -> tuple[int, dict[str, Any]]:
    """Divide activations of one shape into tiles of all groups, and the tiles among programs.

    Each multiprocessor gets at most about ``setting.programs`` programs: one wave. A few more would run by themselves
    after all others, and double the time. If tiles span several j, the weights take the registers of a fourth program.

    Args:
        setting: of the kernel.
        groups: g.
        matrix: g x g matrices are multiplied with the tiles. Up to 64 groups a program keeps the matrices. Larger ones
            are read in slices of DEPTH columns for every tile.
        one_j: a program works on a single j.
        limited: to ``max_tiles`` of a program, as far as the grid allows.
        tensors: by the names of the kernel's parameters. The first decides which columns are neighbors.

    Returns:
        The number of splits of a sample (or of a j), and the arguments of ``run`` that follow.
    """
    strides: list[Strides] = []
    arguments: dict[str, Any] = {}
    for name, tensor in tensors.items():
        found = _strides(tensor)
        if found is None:
            raise ValueError(
                f"strides {tensor.stride()} of shape {tuple(tensor.shape)}: unsupported. Fix: call prepare(x) first."
            )
        strides.append(found)
        arguments |= {
            f"{name}_ptr": tensor,
            f"{name}_n": found.sample,
            f"{name}_outer": found.outer,
        }
        arguments[f"{name.upper()}_J"] = found.j_first
    x = next(iter(tensors.values()))
    n, channels, *spatial = x.shape
    cpg, positions, rows = channels // groups, prod(spatial), padded_rows(groups)
    # VECTOR: power of two that divides all strides and, unless j_first, the positions
    vector = gcd(16, *(stride for each in strides for stride in each[:2]))
    if not all(each.j_first for each in strides):
        vector = gcd(vector, positions)
    sliced = matrix and groups > 64
    columns = (
        64 if sliced else min(256, max(32, setting.tile_bytes // (rows * x.element_size())))
    )
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
    others = n * cpg if one_j else n
    programs = min(setting.programs, 3) if matrix and jb > 1 else setting.programs
    per_split = max(
        setting.min_tiles, triton.cdiv(tiles, max(1, programs * processors(x.device) // others))
    )
    if limited:
        per_split = max(min(per_split, tuning_for(x).max_tiles), triton.cdiv(tiles, _MAX_GRID))
    splits = triton.cdiv(tiles, per_split)
    # a single stage where elements would be copied asynchronously one by one
    stages = 1 if vector * x.element_size() < 8 else setting.stages
    if matrix:
        arguments |= {
            "DEPTH": 16 if sliced else rows,
            "HALVES": in_halves(x, groups),
            "OPERAND": operand_dtype(x),
        }
        arguments["columns"] = float(x[0].numel() // groups)
    return splits, arguments | {
        "grid": (others, splits), "like": x, "warps": 4 if groups <= 64 else 8, "stages": stages,
        "positions": positions, "tiles": tiles, "per_split": per_split,
        "GROUPS": groups, "ROWS": rows, "CPG": cpg, "JB": jb, "PB": pb, "VECTOR": vector,
        "PRECISION": input_precision(x),
    }  # fmt: skip


def padded_rows(groups: int) -> int:
    """Return the rows of a padded matrix; tl.dot needs at least 16."""
    return max(16, triton.next_power_of_2(groups))


def tuning_for(x: Tensor) -> Tuning:
    """Return the settings for the dtype of ``x``."""
    return _tuning or (HOPPER[x.dtype] if is_hopper(x) else Tuning())


def in_halves(x: Tensor, groups: int) -> bool:
    """Whether products with g x g matrices split their operands, float32 values, into two float16.

    These have the accuracy of two tf32, half their bytes, and need no transposed copy in shared memory. A single tf32
    would take 0.85 of the instructions for float16 input, but lose digits where large eigenvalues cancel.
    """
    return groups <= 64 and (x.dtype == torch.float16 or input_precision(x) == "tf32x3")


def is_hopper(x: Tensor) -> bool:
    """Whether tensor cores read their right operand from shared memory (also assumed without a GPU)."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _META_PROCESSORS if device.type == "meta" else 1


def operand_dtype(x: Tensor) -> Any:
    """Return OPERAND, the dtype of operands (table in ``triton/__init__.py``)."""
    # the interpreter has no bfloat16 products
    return tl.bfloat16 if x.dtype == torch.bfloat16 and not INTERPRETED else tl.float32


def input_precision(x: Tensor) -> str:
    """Return PRECISION, the ``input_precision`` of products over columns."""
    if x.dtype != torch.float32:
        return "tf32"
    backend = torch.backends.cuda.matmul
    chosen = getattr(
        backend, "fp32_precision", None
    )  # newer torch refuses the older name if both have been used
    return "tf32" if chosen == "tf32" or (chosen is None and backend.allow_tf32) else "tf32x3"


def empty(like: Tensor, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialized scratch tensor on the device of ``like``."""
    scratch = torch.empty(size, dtype=dtype, device=like.device)
    if _current.recording is not None:
        _current.recording.scratch.append(scratch)
    return scratch


def run(
    kernel: Any, grid: tuple[int, int], like: Tensor, warps: int, stages: int, **arguments: Any
) -> None:
    """Launch a kernel on the device of ``like``."""
    launch = Launch(kernel, grid, like, warps, stages, arguments)
    recording = _current.recording
    compiled = (
        launch.run() if not like.is_meta and (recording is None or recording.execute) else None
    )
    if recording is not None:
        recording.launches.append(launch)
        recording.compiled.append(compiled)
