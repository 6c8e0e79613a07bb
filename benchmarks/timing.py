"""Times of several contenders side by side on a machine whose speed drifts."""

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

#: untimed calls before the first timed one: libraries choose their algorithms, kernels are compiled
WARM_UP = 3
_FLUSH_BYTES = 256 * 2**20  # more than the last cache of any GPU


def _nothing() -> None:
    pass


class Step(NamedTuple):
    """What is timed: ``run``, after an untimed ``prepare``."""

    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing


class Quantiles(NamedTuple):
    """20 %, 50 % and 80 % quantiles of times, in milliseconds."""

    q20: float
    median: float
    q80: float


def alternate(
    steps: Mapping[str, Step], repeats: int, device: torch.device, tick: Callable[[], object] = _nothing
) -> dict[str, Quantiles]:
    """Times the steps in rounds: each round runs every step once, in an order of its own, the same in every run.

    A drift of the machine hits all alike, and none always follows the same other, which leaves it its caches. On a GPU
    the time is the one between two CUDA events, with the cache emptied before; the host may run ahead, as it does in
    training.

    Args:
        steps: by name.
        repeats: the number of rounds.
        device: where the steps run.
        tick: called after each run, :func:`runs` times for each step.

    Returns:
        The quantiles over the rounds, by name.
    """
    for step in steps.values():
        for _ in range(WARM_UP):
            step.prepare()
            step.run()
            tick()
    clock = _cuda_times if device.type == "cuda" else _cpu_times
    names = list(steps)  # none, if nothing can run
    shuffled = random.Random(0)
    order = [name for _ in range(repeats) for name in shuffled.sample(names, len(names))]
    with _no_garbage_collection():
        times = clock([steps[name] for name in order], device, tick)
    by_name: dict[str, list[float]] = {name: [] for name in names}
    for name, time in zip(order, times, strict=True):
        by_name[name].append(time)
    return {name: Quantiles(*np.quantile(values, (0.2, 0.5, 0.8)).tolist()) for name, values in by_name.items()}


def runs(repeats: int) -> int:
    """How often :func:`alternate` runs each step, timed or not."""
    return WARM_UP + repeats


def _cpu_times(steps: list[Step], device: torch.device, tick: Callable[[], object]) -> list[float]:
    times = []
    for step in steps:
        step.prepare()
        start = perf_counter()
        result = step.run()
        times.append((perf_counter() - start) * 1e3)
        del result  # freed outside the time, as a layer's output outlives it
        tick()
    return times


def _cuda_times(steps: list[Step], device: torch.device, tick: Callable[[], object]) -> list[float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = []
    for step in steps:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step.prepare()
        flush.zero_()
        start.record()
        step.run()
        end.record()
        events.append((start, end))
        tick()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
