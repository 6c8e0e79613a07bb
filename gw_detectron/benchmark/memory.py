"""Memory of a step: what the forward pass keeps for the backward pass, the peak on a GPU, what is freed on a CPU."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

MIB = 2**20
#: what becomes of the memory that a step has freed, on a CPU: the process keeps it, or the allocator may return it
FREED_MEMORY = ("keep", "return")
#: of glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def saved_bytes(forward: Callable[[], object], module: nn.Module) -> int:
    """Bytes that a forward pass keeps alive for its backward pass, beside the parameters and buffers of the module.

    Every tensor that automatic differentiation saves is counted by its storage, once, in whole: that is what stays
    allocated. The input counts if it is saved. Tensors kept as plain attributes of a ``torch.autograd.Function`` are
    invisible here; no layer of this package and none of torch's used here keeps one.

    Args:
        forward: runs the pass, with gradients, and returns its result.
        module: what it runs.
    """
    kept = {_storage(tensor) for tensor in (*module.parameters(), *module.buffers())}
    saved: list[Tensor] = []  # alive until all are counted, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        # without its graph: an output that the graph keeps as it is would keep the graph, and nothing would free them
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    del result
    return sum(size for address, size in sizes.items() if address not in kept)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a step allocates at its peak beyond what is allocated before it; None on a CPU, which counts none."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def keep_freed_memory() -> None:
    """Makes this process keep the memory that it frees, as the allocators do that are made for training.

    glibc returns large blocks to the system, now and then as it happens to find them. Fresh ones cost a page fault for
    every 4 KiB, on a virtual machine as long as a pass of arithmetic over a map, and that by chance.

    Raises:
        ValueError: the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1)):
        raise ValueError('freed memory "keep": only glibc can be told so; use "return"')
