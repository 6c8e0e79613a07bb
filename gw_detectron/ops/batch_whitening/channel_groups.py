"""Groups of neighbouring channels of which the last may be smaller, and one matrix for each of them.

The matrices of all groups are one tensor of rows, (C, k): row i belongs to channel i and holds the k numbers of its
group's matrix. In the last group of r < k channels only the first r of them are used.

Shape shorthand: ``C`` channels, ``k`` channels per group, ``r = C mod k`` channels of a smaller last group.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def effective_width(num_channels: int, channels_per_group: int) -> int:
    """The number of channels of a group, k: ``channels_per_group``, capped at the channel count.

    Raises:
        ValueError: an argument is not a positive integer.
    """
    if num_channels < 1 or not isinstance(channels_per_group, int) or channels_per_group < 1:
        raise ValueError(
            f"batch whitening needs positive integers of channels and channels per group, got channels={num_channels} "
            f"and channels_per_group={channels_per_group}"
        )
    return min(channels_per_group, num_channels)


def split(rows: Tensor, width: int) -> list[Tensor]:
    """Divides channels into groups: (C, ...) -> views (C // k, k, ...) and, if r > 0, (1, r, ...).

    Source: the last group may be smaller, as in the authors' "FlexGroup" layers.
    """
    whole = len(rows) // width * width
    parts = [rows[:whole].unflatten(0, (-1, width))]
    if whole < len(rows):
        parts.append(rows[whole:].unsqueeze(0))
    return parts


def join(parts: Iterable[Tensor]) -> Tensor:
    """The inverse of :func:`split`."""
    rows = [part.flatten(0, 1) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def split_matrices(rows: Tensor) -> list[Tensor]:
    """The matrices of all groups, (C, k) -> (C // k, k, k) and, if r > 0, (1, r, r)."""
    return [part[..., : part.shape[1]] for part in split(rows, rows.shape[1])]


def join_matrices(matrices: Iterable[Tensor], width: int) -> Tensor:
    """The inverse of :func:`split_matrices`; what is not used is zero."""
    return join(torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in matrices)
