"""One normalisation layer: its time and memory beside those of its alternatives."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .layer_settings import MEMORY, LayerSettings
from .machine import describe
from .memory import MIB, peak_bytes, saved_bytes
from .providers import LAYERS, MODES, Case, floor_step, module_step
from .table import Row, Table, time_cells
from .timing import Step, alternate, runs

#: the providers that all are divided by
BASES = ("figure1", "group_norm", "batch_norm", "floor", "relu_apart")


def benchmark_layer(settings: LayerSettings, command: str = "") -> Table:
    """Measures the providers side by side: time forward, time forward and backward, memory kept for the backward pass.

    Where a case cannot be done with a provider (no kernel for the dtype, no compiler, not enough memory) the row has
    the reason instead of numbers; the layer itself has to work.

    Args:
        settings: what is measured.
        command: the command line, for the header.

    Returns:
        A table of the kind ``layer``. Its ``to_NAME`` is the median time divided by that of NAME in the same rounds.
    """
    timed, counted = settings.timed_modes, settings.counted_shapes
    total = len(timed) * len(settings.shapes) * runs(settings.repeats) + len(counted)
    rows: list[Row] = []
    with tqdm(total=total * len(settings.precisions) * len(settings.providers), unit="run", mininterval=0.5) as bar:
        for precision in settings.precisions:
            for mode in timed:
                for shape in settings.shapes:
                    rows += _timed(settings.case(shape, precision, mode), settings, bar)
            for shape in counted:
                rows += _remembered(settings.case(shape, precision, MODES[-1]), settings, bar)
    return Table("layer", describe(settings.device, settings.precisions, command) | settings.header, rows)


def planned_layer(settings: LayerSettings) -> Table:
    """What :func:`benchmark_layer` is going to measure: its rows, with 1 for every ratio."""
    to_bases = {f"to_{base}": 1.0 for base in BASES if base in settings.providers}
    to_group_norm = {"saved_to_group_norm": 1.0} if "group_norm" in settings.providers else {}
    rows: list[Row] = []
    for precision in settings.precisions:
        for mode in settings.timed_modes:
            for case in (settings.case(shape, precision, mode) for shape in settings.shapes):
                rows += [_key(case, mode, name) | to_bases for name in settings.providers]
        for case in (settings.case(shape, precision, MODES[-1]) for shape in settings.counted_shapes):
            rows += [_key(case, MEMORY, name) | to_group_norm for name in settings.providers if name != "floor"]
    return Table("layer", settings.header, rows)


@dataclass(frozen=True)
class _Skipped:
    reason: str


def _attempt(name: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (RuntimeError, ValueError) as error:  # out of memory, the compiler; batch norm of one value per channel
        if name.startswith("ours"):
            raise
        return _Skipped(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}")


def _timed(case: Case, settings: LayerSettings, bar: tqdm) -> list[Row]:
    bar.set_description(f"{case.precision} {case.mode} {case.shape_text}")
    x = case.input()
    built = {name: _attempt(name, partial(_tried_step, name, x, case)) for name in settings.providers}
    steps = {name: step for name, step in built.items() if isinstance(step, Step)}
    times = alternate(steps, settings.repeats, case.device, bar.update)
    rows: list[Row] = []
    for name, step in built.items():
        row = _key(case, case.mode, name)
        if isinstance(step, _Skipped):
            row["note"] = step.reason
            bar.update(runs(settings.repeats))
        else:
            row |= time_cells(times[name], settings.repeats)
            row |= {f"to_{base}": times[name].median / times[base].median for base in BASES if base in times}
        rows.append(row)
    return rows


def _tried_step(name: str, x: Tensor, case: Case) -> Step:
    step = floor_step(x, case) if name == "floor" else module_step(_module(name, case), x, case)
    step.run()
    return step


def _module(name: str, case: Case) -> torch.nn.Module:
    return case.place(LAYERS[name](case))


def _remembered(case: Case, settings: LayerSettings, bar: tqdm) -> list[Row]:
    """The rows of memory; the floor keeps nothing and has none."""
    bar.set_description(f"{case.precision} {MEMORY} {case.shape_text}")
    x = case.input()
    names = [name for name in settings.providers if name != "floor"]
    found = {name: _attempt(name, partial(_memory, name, x, case)) for name in names}
    bar.update(len(settings.providers))
    base = found.get("group_norm")
    rows: list[Row] = []
    for name, memory in found.items():
        row = _key(case, MEMORY, name)
        if isinstance(memory, _Skipped):
            row["note"] = memory.reason
        else:
            saved, peak = memory
            row |= {"saved_mib": saved / MIB, "peak_mib": None if peak is None else peak / MIB}
            if isinstance(base, tuple):
                row["saved_to_group_norm"] = saved / base[0]
        rows.append(row)
    return rows


def _memory(name: str, x: Tensor, case: Case) -> tuple[int, int | None]:
    module = _module(name, case)
    step = module_step(module, x, case)
    step.run()  # what only a first run allocates
    step.prepare()
    peak = peak_bytes(step.run, case.device)
    step.prepare()
    return saved_bytes(lambda: case.apply(module, x), module), peak


def _key(case: Case, mode: str, provider: str) -> dict[str, Any]:
    return {"shape": case.shape_text, "dtype": case.precision, "mode": mode, "provider": provider, "note": ""}
