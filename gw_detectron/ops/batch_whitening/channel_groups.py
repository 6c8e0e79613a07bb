"""Groups of contiguous channels, of which the last may be smaller.

The matrices of all groups are stored as one tensor of rows, (C, k): row i belongs to channel i and holds the k numbers
of its group's matrix. A smaller last group of r channels uses the first r of them.

Shapes: ``C`` channels, ``k`` channels per group, ``r = C mod k`` channels of a smaller last group.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..checks import check_integer


def effective_width(num_channels: int, channels_per_group: int) -> int:
    """Return the channels per group k, capped at the channel count.

    Raises:
        ValueError: an argument is not a positive integer.
    """
    check_integer("channels_per_group", channels_per_group, 1, 64)
    if num_channels < 1:
        raise ValueError(f"num_channels ({num_channels}): expected at least 1. Fix: give input with channels.")
    return min(channels_per_group, num_channels)


def split(rows: Tensor, width: int) -> list[Tensor]:
    """Split channels into groups, as views.

    (C, ...) -> (C // k, k, ...) and, if r > 0, (1, r, ...).

    Source: the last group may be smaller, as in the authors' "FlexGroup" layers.
    """
    whole = len(rows) // width * width
    parts = [rows[:whole].unflatten(0, (-1, width))]
    if whole < len(rows):
        parts.append(rows[whole:].unsqueeze(0))
    return parts


def join(parts: Iterable[Tensor]) -> Tensor:
    """Invert :func:`split`."""
    rows = [part.flatten(0, 1) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def split_matrices(rows: Tensor) -> list[Tensor]:
    """Return the matrices of all groups.

    (C, k) -> (C // k, k, k) and, if r > 0, (1, r, r).
    """
    return [part[..., : part.shape[1]] for part in split(rows, rows.shape[1])]


def join_matrices(matrices: Iterable[Tensor], width: int) -> Tensor:
    """Invert :func:`split_matrices`; unused elements are zero."""
    return join(torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in matrices)
