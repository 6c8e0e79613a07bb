"""Compute dtype, thresholds of rounding, autocast and memory format, shared by all operations."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the compute dtype: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def zero_variance_threshold(dtype: torch.dtype) -> float:
    """Return the variance up to which a covariance counts as zero.

    In the backward pass, variance^(-3/2) must not overflow.
    """
    return torch.finfo(dtype).tiny ** 0.5


def rounding_floor(largest: Tensor, size: int, least: float | Tensor = 0.0) -> Tensor:
    """Return the value up to which an eigenvalue or pivot counts as zero.

    In matrices of side ``size``, ``largest`` is the largest value of each, or the variance of each channel; ``least`` a
    known lower bound. At or above the unit roundoff of ``largest`` it survives the sum with it in
    this dtype. Then the matrix is regular and only :func:`zero_variance_threshold` counts.
    """
    dtype = largest.dtype
    rounding = torch.finfo(dtype).eps
    is_lost = least < 0.5 * rounding * largest
    floor = torch.where(is_lost, size * rounding * largest, 0.0)
    return floor.clamp_min(zero_variance_threshold(dtype))


def autocast_off(device_type: str) -> AbstractContextManager:
    """Disable autocast, which would round the operands of statistics and solver."""
    has_autocast = device_type in ("cpu", "cuda", "mps", "xpu")
    if has_autocast and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last (or channels_last_3d) if ``x`` has it, else contiguous_format."""
    rank_formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.is_contiguous() or x.dim() not in rank_formats:
        return torch.contiguous_format

    channels_last = rank_formats[x.dim()]
    if x.is_contiguous(memory_format=channels_last):
        return channels_last
    return torch.contiguous_format
