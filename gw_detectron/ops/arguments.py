"""Checks of the arguments of operations and layers."""

from math import inf
from numbers import Real
from typing import Any

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
            f"x: expected shape (N, {channels or 'C'}, *spatial), got {tuple(x.shape)}. "
            "Fix: give such input."
        )
    if not x.is_floating_point():
        raise ValueError(
            f"x: expected a floating point dtype, got {x.dtype}. "
            "Fix: convert it, e.g. x.float()."
        )

    if weight is not None:
        _check_parameter("weight", weight, x)
    if bias is not None:
        _check_parameter("bias", bias, x)


def _check_parameter(name: str, parameter: Tensor, x: Tensor) -> None:
    if parameter.shape != x.shape[1:2]:
        raise ValueError(
            f"{name}: expected shape ({x.shape[1]},), got {tuple(parameter.shape)}. "
            "Fix: give one value per channel of x."
        )
    if parameter.device != x.device:
        raise ValueError(
            f"{name}: on {parameter.device}, but x is on {x.device}. "
            "Fix: move one, e.g. layer.to(x.device)."
        )


def check_integer(
    name: str, value: Any, *, least: int, example: int, most: int = 2**31 - 1
) -> None:
    """Raise TypeError unless ``value`` is an integer (no bool), ValueError unless within bounds."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        expected = f"an integer, got {type(value).__name__}"
        raise TypeError(_message(name, value, expected, example))

    if not least <= value <= most:
        expected = f"an integer of at least {least}"
        if value > most:
            expected += f" and at most {most}"
        raise ValueError(_message(name, value, expected, example))


def check_divides(num_groups: int, num_channels: int) -> None:
    """Raise ValueError unless the channels can be divided into groups of one size."""
    if num_channels % num_groups:
        divisors = range(1, num_channels + 1)
        allowed = [divisor for divisor in divisors if num_channels % divisor == 0]
        raise ValueError(
            f"num_groups ({num_groups}): does not divide {num_channels} channels. "
            f"Fix: choose one of {allowed}."
        )


def check_number(
    name: str, value: Any, *, least: float, example: float, most: float = inf
) -> None:
    """Raise TypeError unless ``value`` is a number, ValueError unless within bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        expected = f"a number, got {type(value).__name__}"
        raise TypeError(_message(name, value, expected, example))

    number = float(value)
    if not least <= number <= most or number == inf:
        expected = f"a finite number of at least {least}"
        if most < inf:
            expected = f"a finite number from {least} to {most}"
        raise ValueError(_message(name, value, expected, example))


def _message(name: str, value: Any, expected: str, example: float) -> str:
    return f"{name} ({value!r}): expected {expected}. Fix: try {name}={example}."


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} ({value!r}): expected a bool. Fix: pass True or False."
        )
