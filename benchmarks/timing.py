"""Time several steps side by side on a machine whose speed drifts."""

import gc
import random
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gw_detectron.workbench.console import progress_bar

#: untimed calls before the first timed one: libraries choose algorithms, kernels are compiled
WARM_UP = 3
_HEAD_START = 4_000_000  # cycles of a GPU, two milliseconds: longer than the host takes to launch a layer
_FLUSH_BYTES = 256 * 2**20  # larger than the last-level cache of any GPU


class Step(NamedTuple):
    """A timed call ``run`` with an untimed call ``prepare`` before it."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def time_alternating(
    steps: Mapping[str, Step], repeats: int, device: torch.device, label: str = ""
) -> dict[str, dict[str, float]]:
    """Time steps in alternating rounds.

    Each round runs every step once, in random order. A drift of the machine, and the cache that one step leaves to the
    next, affect all steps alike; ``torch.utils.benchmark`` and ``triton.testing`` time one after the other. On a GPU
    the time is the one between two CUDA events, after the cache is flushed. The host runs ahead by two milliseconds, as
    in training, where other layers keep the GPU busy; the time that it takes for the launches is another cell.

    Args:
        steps: by name.
        repeats: the number of rounds.
        device: where the steps run.
        label: of the progress bar.

    Returns:
        The cells of a table by name: repeats, the 20 %, 50 % and 80 % quantiles in milliseconds and, on a GPU, the
        median time of the host.
    """
    flush = (
        torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        if device.type == "cuda"
        else None
    )
    shuffle, names = random.Random(0), list(steps)
    elapsed: dict[str, list[Callable[[], float]]] = {name: [] for name in steps}
    host: dict[str, list[float]] = {name: [] for name in steps}
    collecting = gc.isenabled()
    with progress_bar(
        desc=label, unit="run", total=(WARM_UP + repeats) * len(steps), leave=False
    ) as bar:
        for step in steps.values():
            for _ in range(WARM_UP):
                step.prepare()
                step.run()
                bar.update()
        gc.collect()
        gc.disable()
        try:
            for _ in range(repeats):
                for name in shuffle.sample(names, len(names)):
                    steps[name].prepare()
                    elapsed[name].append(
                        _time_cpu(steps[name])
                        if flush is None
                        else _time_cuda(steps[name], flush, host[name])
                    )
                    bar.update()
        finally:
            if collecting:
                gc.enable()
    if flush is not None:
        torch.cuda.synchronize(device)
    cells = {}
    for name, times in elapsed.items():
        q20, median, q80 = np.quantile(
            [time() for time in times], (0.2, 0.5, 0.8)
        ).tolist()
        cells[name] = {
            "repeats": repeats,
            "median_ms": median,
            "q20_ms": q20,
            "q80_ms": q80,
        }
        if host[name]:
            cells[name]["host_ms"] = float(np.median(host[name]))
    return cells


def _time_cpu(step: Step) -> Callable[[], float]:
    start = perf_counter()
    result = step.run()
    elapsed = (perf_counter() - start) * 1e3
    del result  # freed outside the time, since a layer's output outlives its call
    return lambda: elapsed


def _time_cuda(step: Step, flush: Tensor, host: list[float]) -> Callable[[], float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    # else the events would be as far apart as the launches
    torch.cuda._sleep(_HEAD_START)
    start.record()
    before = perf_counter()
    step.run()
    host.append((perf_counter() - before) * 1e3)
    end.record()
    return lambda: start.elapsed_time(end)
