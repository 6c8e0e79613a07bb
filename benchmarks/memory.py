"""Count the memory of a training step: bytes saved for backward, and the peak on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .timing import Step

_MIB = 2**20


def memory_cells(
    forward: Callable[[], object], step: Step, module: nn.Module, device: torch.device
) -> dict[str, Any]:
    """Return the memory columns of a row, in MiB: saved for backward, and the peak of a step on a GPU."""
    step.run()  # allocates what only a first run allocates
    step.prepare()
    cells = {}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step.run()
        torch.cuda.synchronize(device)
        cells["peak_mib"] = (torch.cuda.max_memory_allocated(device) - before) / _MIB
        step.prepare()
    return {"saved_mib": saved_bytes(forward, module) / _MIB, **cells}


def saved_bytes(forward: Callable[[], object], module: nn.Module) -> int:
    """Count the bytes that a forward pass saves for backward, without parameters and buffers.

    Every saved storage counts once and in whole, since it stays allocated in whole. The input counts if it is saved.

    Args:
        forward: runs the pass with gradients and returns its result.
        module: the module that it runs.
    """
    excluded = {
        _storage(tensor) for tensor in (*module.parameters(), *module.buffers())
    }
    # kept alive until all are counted, so that no address is used twice
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        # an output saved with its graph would be a reference cycle
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    del result
    return sum(size for address, size in sizes.items() if address not in excluded)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
