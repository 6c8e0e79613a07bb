"""Benchmark of one layer: time and memory of Group Whitening and its alternatives."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gw_detectron.errors import ConfigError

from .memory import memory_cells
from .providers import Case, layer_step, provider_step
from .table import Row, note_of
from .timing import Step, time_alternating

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
#: the mode that counts the bytes saved for backward and the peak of both passes
MEMORY = "memory"
#: providers that all others are divided by
BASELINES = ("figure1", "group_norm", "batch_norm", "floor", "relu_apart")


def parse_shape(text: str) -> Shape:
    """Parse ``2x64x200x336``."""
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--shapes ({text!r}): not four positive integers. Fix: give N, C, H, W as 2x64x200x336."
        )
    n, c, h, w = map(int, parts)
    return n, c, h, w


def measure_layers(
    cases: Sequence[Case], providers: Sequence[str], repeats: int
) -> Iterator[Row]:
    """Measure the providers of each case side by side.

    A provider that cannot run a case (no kernel for the dtype, no compiler, out of memory) gets the reason in its row
    instead of numbers. An error of this package's own layer is raised.

    Yields:
        A row for each case and provider. ``to_NAME`` is the median time divided by that of NAME in the same rounds.
    """
    for number, case in enumerate(cases, start=1):
        measure = (
            _memory
            if case.mode == MEMORY
            else partial(_times, repeats, f"{number}/{len(cases)} {case}")
        )
        key = {"shape": case.shape_text, "dtype": case.dtype, "mode": case.mode}
        for name, cells in measure(case, providers).items():
            yield key | {"provider": name} | cells


def _try(provider: str, measure: Callable[[], Any]) -> Any:
    """Return the result, or the cell of a note if another layer than this package's own cannot run."""
    try:
        return measure()
    # out of memory, the compiler, BatchNorm of one value per channel
    except (
        RuntimeError,
        ValueError,
    ) as error:
        if provider.startswith("ours"):
            raise
        return {"note": note_of(error)}


def _times(
    repeats: int, label: str, case: Case, providers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    x = case.input()

    def build(provider: str) -> Step:
        step = provider_step(provider, x, case)
        step.run()
        return step

    found = {name: _try(name, partial(build, name)) for name in providers}
    times = time_alternating(
        {name: step for name, step in found.items() if isinstance(step, Step)},
        repeats,
        case.device,
        label,
    )
    for name, cells in times.items():
        ratios = {
            f"to_{base}": cells["median_ms"] / times[base]["median_ms"]
            for base in BASELINES
            if base in times
        }
        found[name] = cells | ratios
    return found


def _memory(case: Case, providers: Sequence[str]) -> dict[str, dict[str, Any]]:
    x = case.input()

    def measure(provider: str) -> dict[str, Any]:
        module = case.build(provider)
        return memory_cells(
            lambda: case.apply(module, x),
            layer_step(module, x, case),
            module,
            case.device,
        )

    # which saves nothing
    found = {
        name: _try(name, partial(measure, name))
        for name in providers
        if name != "floor"
    }
    if baseline := found.get("group_norm", {}).get("saved_mib"):
        for cells in found.values():
            if "saved_mib" in cells:
                cells["saved_to_group_norm"] = cells["saved_mib"] / baseline
    return found
