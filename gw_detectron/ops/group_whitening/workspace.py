"""Buffers that a thread keeps and uses again.

Memory that is fresh from the system costs the CPU more than a pass of arithmetic over it, and a training iteration asks
for the same few buffers hundreds of times. Other devices have an allocator that keeps memory by itself.
"""

import math
import threading

import torch
from torch import Tensor


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[tuple[str, torch.dtype], Tensor] = {}


_BUFFERS = _Buffers()


def scratch(name: str, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of ``like``'s dtype and device; the next call of this name invalidates it."""
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    size = math.prod(shape)
    key = (name, like.dtype)
    if key not in _BUFFERS.by_name or _BUFFERS.by_name[key].numel() < size:
        with torch.inference_mode(False):  # else it could not be used in training afterwards
            _BUFFERS.by_name[key] = torch.empty(size, dtype=like.dtype)
    return _BUFFERS.by_name[key][:size].view(shape)
