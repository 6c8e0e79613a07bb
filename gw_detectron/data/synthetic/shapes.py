"""Unit shapes of the synthetic datasets as signed distance fields."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray

_STAR_OUTER, _STAR_INNER = 1.25, 0.56
_TRIANGLE_INRADIUS = 0.66
_SQUARE_HALF = 0.88
_CROSS_LONG, _CROSS_SHORT = 1.08, 0.38
_RING_OUTER, _RING_INNER = 1.05, 0.5


def _star(x: Array, y: Array) -> Array:
    # By symmetry one edge is enough: fold the plane into the wedge between a tip and the notch beside it.
    wedge = np.pi / 5
    angle = np.abs(np.mod(np.arctan2(y, x) + wedge, 2 * wedge) - wedge)
    radius = np.hypot(x, y)
    edge_x = _STAR_INNER * np.cos(wedge) - _STAR_OUTER
    edge_y = _STAR_INNER * np.sin(wedge)
    length = np.hypot(edge_x, edge_y)
    along_x, along_y = radius * np.cos(angle) - _STAR_OUTER, radius * np.sin(angle)
    return (along_x * edge_y - along_y * edge_x) / length


def _cross(x: Array, y: Array) -> Array:
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.minimum(x, y) - _CROSS_SHORT, np.maximum(x, y) - _CROSS_LONG)


def _ring(x: Array, y: Array) -> Array:
    radius = np.hypot(x, y)
    return np.maximum(radius - _RING_OUTER, _RING_INNER - radius)


class Shape(NamedTuple):
    """One class of the dataset.

    Args:
        name: of the class.
        sdf: signed distance field of its unit shape.
        area: of the unit shape.
    """

    name: str
    sdf: Callable[[Array, Array], Array]
    area: float


SHAPES: tuple[Shape, ...] = (
    Shape("disk", lambda x, y: np.hypot(x, y) - 1.0, np.pi),
    Shape("square", lambda x, y: np.maximum(np.abs(x), np.abs(y)) - _SQUARE_HALF, 4 * _SQUARE_HALF**2),
    Shape(
        "triangle",
        lambda x, y: np.maximum(y, np.abs(x) * np.sqrt(0.75) - 0.5 * y) - _TRIANGLE_INRADIUS,
        3 * np.sqrt(3) * _TRIANGLE_INRADIUS**2,
    ),
    Shape("star", _star, 5 * _STAR_OUTER * _STAR_INNER * np.sin(np.pi / 5)),
    Shape("cross", _cross, 8 * _CROSS_LONG * _CROSS_SHORT - 4 * _CROSS_SHORT**2),
    Shape("ring", _ring, np.pi * (_RING_OUTER**2 - _RING_INNER**2)),
)
