"""Memory of a step: what the forward pass keeps for the backward pass, and the peak on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

MIB = 2**20


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
