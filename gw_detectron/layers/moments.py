"""Mean and squared deviations of columns, gathered from parts."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")


@dataclass(frozen=True)
class Moments:
    """Number of columns, mean (g,), and sum of squared deviations (g, g), or (g,) of its diagonal."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, rows: Tensor, *, full: bool) -> "Moments":
        """Return the moments of rows (g, M), M > 0, with the whole matrix of deviations if ``full``."""
        mean = rows.mean(1)
        centered = rows - mean[:, None]
        scatter = centered @ centered.mT if full else centered.square().sum(1)

        wide = torch.float32 if rows.is_mps else torch.float64  # MPS has no float64
        return cls(rows.shape[1], mean.to(wide), scatter.to(wide))

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of both (Chan, Golub and LeVeque, 1983)."""
        count = self.count + other.count
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.count / count)

        spread = (
            torch.outer(shift, shift) if self.scatter.dim() == 2 else shift.square()
        )
        between = spread * (self.count * other.count / count)
        scatter = self.scatter + other.scatter + between
        return Moments(count, mean, scatter)


def add_moments(sums: dict[Key, Moments], key: Key, moments: Moments) -> None:
    """Add moments to those of a key, which may have none yet."""
    sums[key] = sums[key].merged(moments) if key in sums else moments
