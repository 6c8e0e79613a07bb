"""Outlines of the shapes, as signed distance fields of shapes of about unit radius."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray

_STAR_OUTER, _STAR_INNER = 1.25, 0.56
_TRIANGLE_INRADIUS = 0.66
_SQUARE_HALF = 0.88
_CROSS_LONG, _CROSS_SHORT = 1.08, 0.38
_RING_OUTER, _RING_INNER = 1.05, 0.5


class Shape(NamedTuple):
    """A class of objects: signed distance field and area of its unit shape."""

    name: str
    sdf: Callable[[Array, Array], Array]
    area: float


def _disk(x: Array, y: Array) -> Array:
    return np.hypot(x, y) - 1.0


def _square(x: Array, y: Array) -> Array:
    distance = np.maximum(np.abs(x), np.abs(y))
    return distance - _SQUARE_HALF


def _triangle(x: Array, y: Array) -> Array:
    side = np.abs(x) * np.sqrt(0.75) - 0.5 * y
    distance = np.maximum(y, side)
    return distance - _TRIANGLE_INRADIUS


def _star(x: Array, y: Array) -> Array:
    # By symmetry one edge is enough: fold the plane into the wedge between a tip and the notch beside it.
    wedge = np.pi / 5
    angle = np.arctan2(y, x) + wedge
    folded = np.mod(angle, 2 * wedge)
    angle = np.abs(folded - wedge)
    radius = np.hypot(x, y)

    edge_x = _STAR_INNER * np.cos(wedge) - _STAR_OUTER
    edge_y = _STAR_INNER * np.sin(wedge)
    length = np.hypot(edge_x, edge_y)

    from_tip_x = radius * np.cos(angle) - _STAR_OUTER
    from_tip_y = radius * np.sin(angle)
    return (from_tip_x * edge_y - from_tip_y * edge_x) / length


def _cross(x: Array, y: Array) -> Array:
    x = np.abs(x)
    y = np.abs(y)
    thickness = np.minimum(x, y) - _CROSS_SHORT
    extent = np.maximum(x, y) - _CROSS_LONG
    return np.maximum(thickness, extent)


def _ring(x: Array, y: Array) -> Array:
    radius = np.hypot(x, y)
    return np.maximum(radius - _RING_OUTER, _RING_INNER - radius)


SHAPES: tuple[Shape, ...] = (
    Shape("disk", _disk, np.pi),
    Shape("square", _square, 4 * _SQUARE_HALF**2),
    Shape("triangle", _triangle, 3 * np.sqrt(3) * _TRIANGLE_INRADIUS**2),
    Shape("star", _star, 5 * _STAR_OUTER * _STAR_INNER * np.sin(np.pi / 5)),
    Shape("cross", _cross, 8 * _CROSS_LONG * _CROSS_SHORT - 4 * _CROSS_SHORT**2),
    Shape("ring", _ring, np.pi * (_RING_OUTER**2 - _RING_INNER**2)),
)
