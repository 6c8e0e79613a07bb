"""Benchmark of each Triton kernel of a layer: bytes, registers, and time beside a copy of as many bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gw_detectron.errors import ConfigError, check_minimum
from gw_detectron.ops.group_whitening.triton.compiler import ERRORS
from gw_detectron.ops.group_whitening.triton.launch import Launch, Setting, supported, tuned, tuning_for
from gw_detectron.progress import progress_bar

from .compiled_kernels import compile_launch, compiler_tool, kernel_name, layer_launches
from .environment import describe
from .layer_benchmark import Shape
from .providers import PRECISIONS
from .table import Row, Table, note_of
from .timing import Step, time_alternating
from .validation import check_names

#: (N, C, H, W): feature maps of a detector at 800 x 1344 pixels with 16 images, and the regions of two images
SHAPES: tuple[Shape, ...] = ((16, 64, 200, 336), (16, 64, 100, 168), (16, 256, 50, 84), (512, 256, 7, 7))
#: what a sweep changes, one number at a time; the values of the code itself are left out
SWEEP = {
    "programs": (1, 2, 3, 4, 6),
    "stages": (1, 2, 3),
    "tile_bytes": (4096, 8192, 16384),
    "min_tiles": (2, 8),
    "max_tiles": (32, 128),
    "warps": (2, 4, 8),
}

_OLDEST = 70  # compute capability that Triton's LLVM compiles for


@dataclass(frozen=True)
class KernelSettings:
    """Settings of the kernel benchmark.

    Args:
        device: a GPU, or ``meta`` to compile only.
        capability: of the device that is compiled for, e.g. 90.
        shapes: (N, C, H, W).
        dtypes: of the input, names in :data:`.providers.PRECISIONS`.
        repeats: rounds of timed launches.
        groups: g.
        iters: T.
        sweep: also measure the numbers in :data:`SWEEP`.

    Raises:
        ConfigError: a name is unknown, a number too small, the groups do not divide the channels, or the kernels do
            not run on the device.
        MissingPackageError: there is nothing to compile with.
    """

    device: torch.device
    capability: int
    shapes: Sequence[Shape] = SHAPES
    dtypes: Sequence[str] = ("fp32", "bf16")
    repeats: int = 20
    groups: int = 64
    iters: int = 5
    sweep: bool = False

    def __post_init__(self) -> None:
        check_names("--dtypes", self.dtypes, PRECISIONS)
        for name in ("repeats", "groups", "iters"):
            check_minimum(f"--{name}", getattr(self, name))
        for shape in self.shapes:
            if shape[1] % self.groups:
                raise ConfigError(f"--groups ({self.groups}): does not divide {shape[1]} channels. Fix: give others.")
        if self.device.type == "meta":
            check_minimum("--compile-only", self.capability, _OLDEST)
            compiler_tool("ptxas")
        elif not supported(torch.empty(1, self.groups, device=self.device), self.groups):
            raise ConfigError(
                f"--device ('{self.device}'): the kernels need an NVIDIA GPU from Ampere on, Triton 3.3, and at most "
                "128 groups. Fix: give --compile-only 90 to compile them for an H100."
            )

    @property
    def header(self) -> dict[str, str]:
        """The settings that two runs must share for comparable ratios."""
        settings = f"groups={self.groups} iters={self.iters} sm_{self.capability}"
        return {"device": self.device.type, "settings": settings}

    def inputs(self) -> Iterator[tuple[dict[str, str], Tensor]]:
        """Yield the cells of shape and dtype, and an input."""
        for dtype in self.dtypes:
            for shape in self.shapes:
                x = torch.empty(shape, dtype=PRECISIONS[dtype].dtype, device=self.device)
                yield {"shape": "x".join(map(str, shape)), "dtype": dtype}, x if x.is_meta else x.normal_()


def plan_kernels(settings: KernelSettings) -> Table:
    """Return the table that :func:`run_kernels` will measure, with 1 for every ratio."""
    rows: list[Row] = []
    for cells, x in replace(settings, device=torch.device("meta")).inputs():
        for name, variants in _variants(x, settings).items():
            rows += [{**cells, "kernel": name, "setting": setting, "note": "", "to_copy": 1.0} for setting in variants]
    return Table("kernels", settings.header, rows)


def run_kernels(settings: KernelSettings, command: str = "") -> Table:
    """Compile each kernel of a layer and, on a GPU, time it.

    Args:
        settings: what is measured.
        command: the command line, for the header.

    Returns:
        A table of the kind ``kernels``, a row for each launch in the order of a training iteration. ``mib`` counts
        every argument once, as if no cache helped. ``to_copy`` is the median time divided by that of a copy that moves
        as many bytes, in the same rounds.
    """
    rows: list[Row] = []
    for cells, x in settings.inputs():
        variants = _variants(x, settings)
        for name, launches in progress_bar(variants.items(), desc=" ".join(cells.values()), unit="kernel"):
            found = {setting: _compiled(launch, settings.capability) for setting, launch in launches.items()}
            runnable = {setting: launches[setting] for setting, values in found.items() if not values.get("note")}
            times = {} if x.is_meta else _times(runnable, settings, name)
            for setting, values in found.items():
                row = {**cells, "kernel": name, "setting": setting, "note": ""}
                rows.append({**row, **values, **times.get(setting, {})})
    header = describe(settings.device, settings.dtypes, command)
    if settings.device.type == "meta":
        header["machine"] = f"none, compiled for sm_{settings.capability}"
    return Table("kernels", header | settings.header, rows)


def moved_bytes(launch: Launch) -> int:
    """Count the bytes of the tensors that a launch reads and writes, each once."""
    arguments = launch.arguments
    unused = {"workspace_ptr"}  # stays in the caches
    if arguments.get("y_ptr", launch) is None:
        unused.add("masked_ptr")
    tensors = [value for name, value in arguments.items() if isinstance(value, Tensor) and name not in unused]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _variants(x: Tensor, settings: KernelSettings) -> dict[str, dict[str, Launch]]:
    """Return the launches of a layer by kernel and setting; "" is the setting of the code."""
    launch_all = partial(layer_launches, x, settings.groups, iters=settings.iters)
    variants = {f"{i} {kernel_name(launch)}": {"": launch} for i, launch in enumerate(launch_all(), start=1)}
    for name, values in SWEEP.items() if settings.sweep else ():
        for value in values:
            number: dict[str, Any] = {name: value}
            if name != "warps":
                tuning = tuning_for(x)
                if name in Setting._fields:
                    number = {k: v._replace(**number) for k, v in tuning._asdict().items() if isinstance(v, Setting)}
                with tuned(tuning._replace(**number)):
                    changed = launch_all(execute=False)  # they may not fit the device
            else:
                changed = [each[""]._replace(**number) for each in variants.values()]
            for found, launch in zip(variants.values(), changed, strict=True):
                if _numbers(launch) not in map(_numbers, found.values()):
                    found[f"{name}={value}"] = launch
    return variants


def _numbers(launch: Launch) -> tuple[Any, ...]:
    """Return what tells two launches of a kernel apart."""
    plain = [value for value in launch.arguments.values() if not isinstance(value, Tensor)]
    return (launch.grid, launch.warps, launch.stages, *plain)


def _compiled(launch: Launch, capability: int) -> dict[str, Any]:
    cells = {
        "programs": launch.grid[0] * launch.grid[1],
        "warps": launch.warps,
        "stages": launch.stages,
        "mib": moved_bytes(launch) / 2**20,
    }
    try:
        found = compile_launch(launch, capability)
    except ERRORS as error:  # a setting that cannot be compiled
        return cells | {"note": note_of(error)}
    return cells | {"registers": found.registers, "stack": found.stack, "shared_kib": found.shared / 1024}


def _times(launches: dict[str, Launch], settings: KernelSettings, name: str) -> dict[str, dict[str, Any]]:
    """Time the settings of a kernel and a copy in alternating rounds."""
    steps, notes = {}, {}
    for setting, launch in launches.items():
        try:
            launch.run()
            steps[setting] = Step(launch.run)
        except ERRORS as error:  # too much shared memory for the device
            notes[setting] = {"note": note_of(error)}
    size = moved_bytes(launches[""]) // 2
    source, target = (torch.empty(size, dtype=torch.uint8, device=settings.device) for _ in range(2))
    times = time_alternating(
        steps | {"copy": Step(partial(target.copy_, source))}, settings.repeats, settings.device, name
    )
    copy = times.pop("copy")["median_ms"]
    return notes | {setting: cells | {"to_copy": cells["median_ms"] / copy} for setting, cells in times.items()}
