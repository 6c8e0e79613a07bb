"""Benchmark of each Triton kernel of a layer: bytes, registers, and time beside a copy of as many bytes."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gw_detectron.errors import ConfigError
from gw_detectron.ops.group_whitening.triton.compiler import ERRORS
from gw_detectron.ops.group_whitening.triton.plans import Launch
from gw_detectron.ops.group_whitening.triton.support import supported
from gw_detectron.ops.group_whitening.triton.tiling import (
    HOPPER,
    Setting,
    Tuning,
    tuned,
    tuning_for,
)
from gw_detectron.workbench.console import progress_bar

from .compiled_kernels import compile_launch, compiler_tool, kernel_name, layer_launches
from .layer_benchmark import Shape
from .providers import PRECISIONS
from .table import Row, note_of
from .timing import Step, time_alternating

#: (N, C, H, W): feature maps of a detector at 800 x 1344 pixels with 16 images, and the regions of two images
SHAPES: tuple[Shape, ...] = (
    (16, 64, 200, 336),
    (16, 64, 100, 168),
    (16, 256, 50, 84),
    (512, 256, 7, 7),
)
#: what --tune changes, one number at a time; the values of the code itself are left out
TUNED = {
    "programs": (1, 2, 3, 4, 6),
    "stages": (1, 2, 3),
    "tile_bytes": (4096, 8192, 16384),
    "min_tiles": (2, 8),
    "max_tiles": (32, 128),
    "warps": (2, 4, 8),
}


def measure_kernels(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    groups: int,
    iters: int,
    repeats: int,
    device: torch.device,
    capability: int | None = None,
    tune: bool = False,
    channels_last: bool = False,
) -> Iterator[Row]:
    """Compile each kernel of a layer and, on a GPU, time it.

    Args:
        shapes: (N, C, H, W).
        dtypes: of the input, names in :data:`.providers.PRECISIONS`.
        groups: g.
        iters: T.
        repeats: rounds of timed launches.
        device: a GPU, or ``meta`` to compile only.
        capability: the compute capability to compile for, e.g. 90; None takes that of the device.
        tune: also measure the numbers in :data:`TUNED`, one at a time.
        channels_last: the memory format of the input.

    Yields:
        A row for each launch and setting, in the order of a training iteration. ``mib`` counts every argument once, as
        if no cache helped. ``to_copy`` is the median time divided by that of a copy that moves as many bytes, in the
        same rounds.

    Raises:
        ConfigError: the kernels do not run on the device.
        MissingPackageError: there is nothing to compile with.
    """
    compiler_tool("ptxas")
    if capability is None:
        if not supported(torch.empty(1, groups, device=device), groups):
            raise ConfigError(
                f"--device ('{device}'): the kernels need an NVIDIA GPU from Ampere on, Triton 3.3, and at most 128 "
                "groups. Fix: give --compile-only 90 to compile them for an H100."
            )
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    for dtype, shape in itertools.product(dtypes, shapes):
        x = torch.empty(shape, dtype=PRECISIONS[dtype].dtype, device=device)
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        x = x if x.is_meta else x.normal_()
        key = {"shape": "x".join(map(str, shape)), "dtype": dtype}
        with tuned(HOPPER[x.dtype] if capability // 10 == 9 else Tuning()):
            variants = _variants(x, groups, iters, tune)
        for name, launches in progress_bar(
            variants.items(), desc=" ".join(key.values()), unit="kernel"
        ):
            found = {
                setting: _compiled(launch, capability)
                for setting, launch in launches.items()
            }
            runnable = {
                setting: launches[setting]
                for setting, values in found.items()
                if "note" not in values
            }
            times = {} if x.is_meta else _times(runnable, repeats, device, name)
            for setting, cells in found.items():
                yield {
                    **key,
                    "kernel": name,
                    "setting": setting,
                    **cells,
                    **times.get(setting, {}),
                }


def moved_bytes(launch: Launch) -> int:
    """Count the bytes of the tensors that a launch reads and writes, each once."""
    arguments = launch.arguments
    unused = "masked_ptr" if arguments.get("y_ptr", launch) is None else ""
    tensors = [
        value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and name != unused
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _variants(
    x: Tensor, groups: int, iters: int, tune: bool
) -> dict[str, dict[str, Launch]]:
    """Return the launches of a layer by kernel and setting; "" is the setting of the code."""
    launch_all = partial(layer_launches, x, groups, iters=iters)
    variants = {
        f"{i} {kernel_name(launch)}": {"": launch}
        for i, launch in enumerate(launch_all(), start=1)
    }
    for name, values in TUNED.items() if tune else ():
        for value in values:
            number: dict[str, Any] = {name: value}
            if name != "warps":
                tuning = tuning_for(x)
                if name in Setting._fields:
                    number = {
                        k: v._replace(**number)
                        for k, v in tuning._asdict().items()
                        if isinstance(v, Setting)
                    }
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
    plain = [
        value for value in launch.arguments.values() if not isinstance(value, Tensor)
    ]
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
    return cells | {
        "registers": found.registers,
        "stack": found.stack,
        "shared_kib": found.shared / 1024,
    }


def _times(
    launches: dict[str, Launch], repeats: int, device: torch.device, name: str
) -> dict[str, dict[str, Any]]:
    """Time the settings of a kernel and a copy in alternating rounds."""
    steps, notes = {}, {}
    for setting, launch in launches.items():
        try:
            launch.run()
            steps[setting] = Step(launch.run)
        except ERRORS as error:  # too much shared memory for the device
            notes[setting] = {"note": note_of(error)}
    size = moved_bytes(launches[""]) // 2
    source, target = (
        torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)
    )
    times = time_alternating(
        steps | {"copy": Step(partial(target.copy_, source))}, repeats, device, name
    )
    copy = times.pop("copy")["median_ms"]
    return notes | {
        setting: cells | {"to_copy": cells["median_ms"] / copy}
        for setting, cells in times.items()
    }
