"""Argument checks, compute dtype, autocast and memory format, shared by all operations."""

from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_tensors(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    channels: int | None = None,
) -> None:
    """Raise ValueError unless x is floating point (N, C, *spatial), and weight and bias are (C,) on its device."""
    if x.dim() < 2 or (channels is not None and x.shape[1] != channels):
        raise ValueError(
            f"x: expected shape (N, {channels or 'C'}, *spatial), got {tuple(x.shape)}. Fix: give such input."
        )
    if not x.is_floating_point():
        raise ValueError(
            f"x: expected a floating point dtype, got {x.dtype}. Fix: convert it, e.g. x.float()."
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[1:2]:
            raise ValueError(
                f"{name}: expected shape ({x.shape[1]},), got {tuple(parameter.shape)}. "
                "Fix: give one value per channel of x."
            )
        if parameter is not None and parameter.device != x.device:
            raise ValueError(
                f"{name}: on {parameter.device}, but x is on {x.device}. Fix: move one, e.g. layer.to(x.device)."
            )


def check_integer(
    name: str, value: Any, least: int, example: int, most: int = 2**31 - 1
) -> None:
    """Raise TypeError unless ``value`` is an integer (no bool), ValueError unless within bounds."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{name} ({value!r}): expected an integer, got {type(value).__name__}. Fix: try {name}={example}."
        )
    if not least <= value <= most:
        allowed = f"of at least {least}" + (f" and at most {most}" if value > most else "")
        raise ValueError(
            f"{name} ({value!r}): expected an integer {allowed}. Fix: try {name}={example}."
        )


def check_number(name: str, value: Any, least: float, most: float, example: float) -> None:
    """Raise TypeError unless ``value`` is a number, ValueError unless within bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} ({value!r}): expected a number, got {type(value).__name__}. Fix: try {name}={example}."
        )
    if not (least <= float(value) <= most and float(value) < float("inf")):
        allowed = f"from {least} to {most}" if most < float("inf") else f"of at least {least}"
        raise ValueError(
            f"{name} ({value!r}): expected a finite number {allowed}. Fix: try {name}={example}."
        )


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} ({value!r}): expected a bool. Fix: pass True or False.")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the compute dtype: float64 for float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def zero_variance_threshold(dtype: torch.dtype) -> float:
    """Return the variance up to which a covariance counts as zero: variance^(-3/2) must not overflow in backward."""
    return torch.finfo(dtype).tiny ** 0.5


def rounding_floor(largest: Tensor, size: int, least: float | Tensor = 0.0) -> Tensor:
    """Return the value up to which an eigenvalue or pivot counts as zero, in matrices of side ``size``.

    ``largest`` is the largest value of each matrix, or the variance of each channel; ``least`` a known lower bound. At
    or above the unit roundoff of ``largest`` it survives the sum with it in this dtype. Then the matrix is regular and
    only :func:`zero_variance_threshold` counts.
    """
    rounding = torch.finfo(largest.dtype).eps
    lost = least < 0.5 * rounding * largest
    return torch.where(lost, size * rounding * largest, 0.0).clamp_min(
        zero_variance_threshold(largest.dtype)
    )


def autocast_off(device_type: str) -> AbstractContextManager:
    """Disable autocast, which would round the operands of statistics and solver."""
    if device_type in ("cpu", "cuda", "mps", "xpu") and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last (or channels_last_3d) if ``x`` has it, else contiguous_format."""
    if not x.is_contiguous():
        for rank, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if x.dim() == rank and x.is_contiguous(memory_format=memory_format):
                return memory_format
    return torch.contiguous_format
