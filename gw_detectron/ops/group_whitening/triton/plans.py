"""Launches of kernels, and plans that repeat those of a pass cheaply.

``run`` launches a kernel, ``empty`` makes scratch tensors for it. ``run_planned`` records both in a
pass over an input, and repeats the launches for the next input of the same layout.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....errors import MissingPackageError
from .compiler import ERRORS, triton
from .device_functions import INTERPRETED
from .support import input_precision

#: plans kept before all are dropped; multi-scale training has hundreds of input shapes
_MOST_PLANS = 8192


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
        on_device = (
            torch.cuda.device(self.like.device) if self.like.is_cuda else nullcontext()
        )
        with on_device:
            try:
                return self.kernel[self.grid](
                    **self.arguments, num_warps=self.warps, num_stages=self.stages
                )
            except ERRORS as error:
                if "C compiler" not in str(error):
                    raise
                raise MissingPackageError(
                    f"Triton ({triton.__version__}): finds no C compiler to build its launcher. "
                    "Fix: install gcc, or set the environment variable "
                    "GW_DETECTRON_KERNELS=matmul."
                ) from error


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
_plans: dict[Hashable, "_Plan"] = {}


@contextmanager
def recorded(*, execute: bool = True) -> Iterator[Recording]:
    """Collect the launches of this thread, and run them if ``execute``.

    Those of meta tensors are only collected, for a device of 132 multiprocessors.
    """
    before = _current.recording
    recording = Recording(execute)
    _current.recording = recording
    try:
        yield recording
    finally:
        _current.recording = before


class _Plan:
    """Launches of compiled kernels with all arguments but the addresses of tensors.

    The host time of a layer is that of its launches: Triton binds, specializes and looks up 25
    arguments in each of them. A plan does this once per shape, stride, dtype and alignment.
    """

    def __init__(self, recording: Recording, tensors: Sequence[Tensor | None]) -> None:
        # the place of a tensor: the number of a base address, and an offset in bytes
        places = {id(tensor): (number, 0) for number, tensor in enumerate(tensors)}
        scratch_places = {}
        self.scratch_bytes = 0
        # one allocation for all, each aligned as torch's own
        for tensor in recording.scratch:
            scratch_places[tensor.data_ptr()] = len(tensors), self.scratch_bytes
            self.scratch_bytes += -(-tensor.nbytes // 256) * 256

        self.launches = []
        for launch, compiled in zip(
            recording.launches, recording.compiled, strict=True
        ):
            arguments = [launch.arguments[name] for name in launch.kernel.arg_names]
            slots = []
            for i, value in enumerate(arguments):
                if isinstance(value, Tensor):
                    place = places.get(id(value)) or scratch_places[value.data_ptr()]
                    slots.append((i, *place))
                    arguments[i] = 0
            self.launches.append((compiled[(*launch.grid, 1)], arguments, slots))

    def run(self, tensors: Sequence[Tensor | None], device: torch.device) -> None:
        """Launch with the addresses of ``tensors``."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        addresses.append(scratch.data_ptr())

        driver = triton.runtime.driver.active
        is_current = driver.get_current_device() == device.index
        with nullcontext() if is_current else torch.cuda.device(device):
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
        key: tells apart all that the launches depend on, except device, precision and addresses of
            tensors. None if ``steps`` calls other operations than ``run``.
        tensors: all that the kernels read and write, x first, besides the tensors that ``empty``
            makes.
        steps: calls ``run`` for each launch.
    """
    x = tensors[0]
    assert x is not None
    if key is None or not _compiled_for(x.device) or _current.recording is not None:
        return steps()
    given = [id(tensor) for tensor in tensors if tensor is not None]
    # a plan could not tell which of them a kernel reads
    if len(set(given)) < len(given):
        return steps()

    aligned = (
        None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in tensors
    )
    key = key, x.device, input_precision(x), *aligned
    plan = _plans.get(key)
    if plan is not None:
        return plan.run(tensors, x.device)

    with recorded() as recording:
        steps()
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = _Plan(recording, tensors)


def forget() -> None:
    """Drop all plans."""
    _plans.clear()


def _compiled_for(device: torch.device) -> bool:
    return device.type == "cuda" and not INTERPRETED


def layout_key(*tensors: Tensor | None) -> Hashable:
    """Return what a launch depends on in its tensors, besides their addresses."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors)


def empty(like: Tensor, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialized scratch tensor on the device of ``like``."""
    scratch = torch.empty(size, dtype=dtype, device=like.device)
    if _current.recording is not None:
        _current.recording.scratch.append(scratch)
    return scratch


def run(
    kernel: Any,
    grid: tuple[int, int],
    like: Tensor,
    warps: int,
    stages: int,
    **arguments: Any,
) -> None:
    """Launch a kernel on the device of ``like``."""
    launch = Launch(kernel, grid, like, warps, stages, arguments)
    recording = _current.recording
    if recording is None:
        launch.run()
        return

    executed = recording.execute and not like.is_meta
    recording.launches.append(launch)
    recording.compiled.append(launch.run() if executed else None)
