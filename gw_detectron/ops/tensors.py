"""Input checks, compute dtype, autocast and memory format, shared by all operations."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def check_tensors(what: str, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Raises ValueError for an input or affine parameters that a whitening layer does not take."""
    if x.dim() < 2:
        raise ValueError(f"{what} takes input of shape (N, C, *spatial), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{what} takes floating point input, got {x.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[1:2]:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, expected ({x.shape[1]},)")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The precision of statistics and solver: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def autocast_off(device_type: str) -> AbstractContextManager:
    """Keeps autocast from rounding the operands of statistics and solver."""
    if device_type in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Channels last where ``x`` is, else contiguous."""
    for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and not x.is_contiguous() and x.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format
