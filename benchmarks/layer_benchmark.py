"""Benchmark of one layer: time and memory of Group Whitening and its alternatives."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gw_detectron.errors import ConfigError, check_minimum

from .environment import describe
from .memory import memory_cells
from .providers import GROUP_NORM_GROUPS, MODES, OPTIONAL, PRECISIONS, PROVIDERS, Case, layer_step, provider_step
from .table import Row, Table, note_of
from .timing import Step, time_alternating
from .validation import check_names

Shape = tuple[int, int, int, int]

#: (N, C, H, W) of feature maps of a detector at 800 x 1344 pixels with two images, and of 256 regions of interest
SHAPES: tuple[Shape, ...] = (
    (2, 64, 200, 336),
    (2, 64, 100, 168),
    (2, 128, 50, 84),
    (2, 256, 50, 84),
    (2, 512, 25, 42),
    (2, 256, 100, 168),
    (256, 256, 7, 7),
)
#: shapes measured for memory only: the regions of interest of one image in training
MEMORY_SHAPES: tuple[Shape, ...] = ((512, 256, 7, 7),)
#: the mode that counts the bytes saved for backward and the peak of both passes
MEMORY = "memory"
#: providers that all others are divided by
BASELINES = ("figure1", "group_norm", "batch_norm", "floor", "relu_apart")


def parse_shape(text: str) -> Shape:
    """Parse ``2x64x200x336`` or ``2,64,200,336``.

    Raises:
        ConfigError: these are not four positive integers.
    """
    parts = text.replace(",", "x").split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--shapes ({text!r}): not four positive integers. Fix: give N, C, H, W as 2x64x200x336.")
    n, c, h, w = map(int, parts)
    return n, c, h, w


@dataclass(frozen=True)
class LayerSettings:
    """Settings of the layer benchmark.

    Args:
        device: where.
        shapes: (N, C, H, W), measured for time and memory.
        memory_shapes: measured for memory only.
        dtypes: names in :data:`.providers.PRECISIONS`.
        providers: names in :data:`.providers.PROVIDERS`.
        modes: of :data:`.providers.MODES`, and ``memory``.
        repeats: rounds of timed runs.
        groups: g of the whitening layers, capped at C.
        iters: T of the whitening layers.
        batch_scale: multiplies N of every shape.
        loaded: measure times a second time beside as many busy processes as torch has threads.

    Raises:
        ConfigError: a name is unknown, a number too small, a shape does not fit a provider, or nothing is measured.
    """

    device: torch.device
    shapes: Sequence[Shape] = SHAPES
    memory_shapes: Sequence[Shape] = MEMORY_SHAPES
    dtypes: Sequence[str] = ("fp32",)
    providers: Sequence[str] = tuple(name for name in PROVIDERS if name not in OPTIONAL)
    modes: Sequence[str] = (*MODES, MEMORY)
    repeats: int = 20
    groups: int = 64
    iters: int = 5
    batch_scale: int = 1
    loaded: bool = False

    def __post_init__(self) -> None:
        check_names("--providers", self.providers, PROVIDERS)
        check_names("--dtypes", self.dtypes, PRECISIONS)
        check_names("--modes", self.modes, (*MODES, MEMORY))
        for name in ("repeats", "groups", "iters", "batch_scale"):
            check_minimum(f"--{name.replace('_', '-')}", getattr(self, name))
        if set(self.providers) == {"floor"} and set(self.modes) == {MEMORY}:
            raise ConfigError(
                "--providers ('floor'): saves nothing, so mode memory has nothing to measure. "
                f"Fix: add another provider, or a mode of {', '.join(MODES)}."
            )
        for case in self.cases():
            for name in self.providers:
                divisor = case.channel_divisor(name)
                if case.channels % divisor:
                    raise ConfigError(
                        f"--shapes ({case.shape_text!r}): {name} needs channels that {divisor} divides, not "
                        f"{case.channels}. Fix: give another shape, or leave out {name}."
                    )

    @property
    def header(self) -> dict[str, str]:
        """The settings that two runs must share for comparable ratios."""
        text = f"groups={self.groups} iters={self.iters} group_norm={GROUP_NORM_GROUPS}"
        return {"device": self.device.type, "settings": text}

    def cases(self) -> Iterator[Case]:
        """Yield the cases in the order of measurement, memory last in each dtype."""
        for dtype in self.dtypes:
            for mode in sorted(self.modes, key=lambda mode: mode == MEMORY):
                for n, c, h, w in (*self.shapes, *(self.memory_shapes if mode == MEMORY else ())):
                    shape = (n * self.batch_scale, c, h, w)
                    yield Case(shape, dtype, mode, self.device, self.groups, self.iters)

    def providers_of(self, case: Case) -> list[str]:
        """Return the providers of a case. The floor saves nothing: it has no rows of memory."""
        return [name for name in self.providers if (case.mode, name) != (MEMORY, "floor")]


def plan_layer(settings: LayerSettings) -> Table:
    """Return the table that :func:`run_layer` will measure, with 1 for every ratio."""
    rows: list[Row] = []
    for case in settings.cases():
        memory = case.mode == MEMORY
        baselines = {"saved_to_group_norm": "group_norm"} if memory else {f"to_{name}": name for name in BASELINES}
        ratios = {ratio: 1.0 for ratio, name in baselines.items() if name in settings.providers}
        rows += [_key(case, name) | ratios for name in settings.providers_of(case)]
    return Table("layer", settings.header, rows)


def run_layer(settings: LayerSettings, command: str = "") -> Table:
    """Measure the providers side by side.

    A provider that cannot run a case (no kernel for the dtype, no compiler, out of memory) gets the reason in its row
    instead of numbers. An error of this package's own layer is raised.

    Args:
        settings: what is measured.
        command: the command line, for the header.

    Returns:
        A table of the kind ``layer``. ``to_NAME`` is the median time divided by that of NAME in the same rounds.
    """
    rows: list[Row] = []
    cases = list(settings.cases())
    for number, case in enumerate(cases, start=1):
        if case.mode == MEMORY:
            rows += _measure_memory(case, settings)
        else:
            rows += _measure_time(case, settings, f"{number}/{len(cases)} {case}")
    return Table("layer", describe(settings.device, settings.dtypes, command) | settings.header, rows)


def _try(provider: str, measure: Callable[[], Any]) -> Any:
    """Return the result, or the cell of a note if another layer than this package's own cannot run."""
    try:
        return measure()
    except (RuntimeError, ValueError) as error:  # out of memory, the compiler, BatchNorm of one value per channel
        if provider.startswith("ours"):
            raise
        return {"note": note_of(error)}


def _key(case: Case, provider: str) -> dict[str, Any]:
    return {"shape": case.shape_text, "dtype": case.dtype, "mode": case.mode, "provider": provider, "note": ""}


def _measure_time(case: Case, settings: LayerSettings, label: str) -> list[Row]:
    x = case.input()

    def build(provider: str) -> Step:
        step = provider_step(provider, x, case)
        step.run()
        return step

    built = {name: _try(name, partial(build, name)) for name in settings.providers_of(case)}
    steps = {name: step for name, step in built.items() if isinstance(step, Step)}
    times = time_alternating(steps, settings.repeats, case.device, label)
    if settings.loaded:
        with _busy_processes(torch.get_num_threads()):
            loaded = time_alternating(steps, settings.repeats, case.device, f"{label}, loaded")
        for name, cells in loaded.items():
            times[name]["loaded_ms"] = cells["median_ms"]
            if "figure1" in loaded:
                times[name]["loaded_to_figure1"] = cells["median_ms"] / loaded["figure1"]["median_ms"]
    medians = {name: cells["median_ms"] for name, cells in times.items()}
    rows: list[Row] = []
    for name, note in built.items():
        ratios = {f"to_{base}": medians[name] / medians[base] for base in BASELINES if {name, base} <= medians.keys()}
        rows.append(_key(case, name) | (times[name] | ratios if name in times else note))
    return rows


def _measure_memory(case: Case, settings: LayerSettings) -> list[Row]:
    x = case.input()

    def measure(provider: str) -> dict[str, Any]:
        module = case.build(provider)
        return memory_cells(lambda: case.apply(module, x), layer_step(module, x, case), module, case.device)

    found = {name: _try(name, partial(measure, name)) for name in settings.providers_of(case)}
    baseline = found.get("group_norm", {}).get("saved_mib")
    rows: list[Row] = []
    for name, cells in found.items():
        ratio = {"saved_to_group_norm": cells["saved_mib"] / baseline} if baseline and "saved_mib" in cells else {}
        rows.append(_key(case, name) | cells | ratio)
    return rows


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Run ``count`` processes without a pause, as other jobs do on a shared machine."""
    endless = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(endless) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
