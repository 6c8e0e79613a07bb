"""Measure the host time of a layer's launches without a GPU: run this file.

Triton compiles for an H100, binds and launches as usual, but its driver does nothing. So the times are those of Python
and Triton alone: what a network pays per layer where the GPU waits for the host. ``GroupNorm`` is one operator of
torch, and computes on the CPU here.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gw_detectron.layers import GroupWhitening2d
from gw_detectron.ops.group_whitening import triton as kernels
from gw_detectron.ops.group_whitening.triton import plans, support

SHAPES = ((2, 64, 8, 8), (2, 256, 8, 8))
REPEATS = 300


class _Utils:
    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
        }

    def unload_module(self, *_: Any) -> None: ...


class _Launcher:
    launches = 0

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> None:
        _Launcher.launches += 1


class _Driver:
    """A driver for tensors on the CPU, which launches nothing."""

    launcher_cls = _Launcher
    utils = _Utils()

    def get_current_stream(self, _: int | None) -> int:
        return 0

    def get_current_device(self) -> int | None:
        return None  # the index of torch.device("cpu")

    def set_current_device(self, _: int) -> None: ...

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _microseconds(run: Callable[[], object]) -> float:
    times = []
    for i in range(REPEATS + 20):
        start = perf_counter()
        run()
        if i >= 20:
            times.append(perf_counter() - start)
    return median(times) * 1e6


def main() -> None:
    """Print the host time of forward, and of forward and backward, of a layer and of GroupNorm."""
    torch.set_num_threads(1)
    driver.set_active(_Driver())
    kernels.INTERPRETED = True  # chooses the kernels for tensors on the CPU
    support.processors = lambda device: 132
    support.compiles_for = lambda device: True
    plans._compiled_for = lambda device: True
    for shape in SHAPES:
        for layer in (GroupWhitening2d(shape[1]), torch.nn.GroupNorm(32, shape[1])):
            print(
                "x".join(map(str, shape)),
                f"{type(layer).__name__:16}",
                _measure(layer, shape),
            )


def _measure(layer: torch.nn.Module, shape: tuple[int, ...]) -> str:
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)

    def both() -> None:
        layer(x).backward(dy)
        x.grad = None
        layer.zero_grad()

    forward, total = _microseconds(lambda: layer(x)), _microseconds(both)
    _Launcher.launches = 0
    both()
    return f"forward {forward:6.1f} us  forward + backward {total:6.1f} us  {_Launcher.launches} launches"


if __name__ == "__main__":
    main()
