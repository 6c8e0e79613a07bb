"""Draw one synthetic scene: textured shapes over clutter, each with the field that says where it is visible.

Shape shorthand in this module: H, W: image height and width in pixels. A *field* is a float array that is
negative inside a region, positive outside, about the distance to its edge in pixels, and zero on the edge.
Fields are sampled at pixel centres on a grid one pixel wider than the image on every side, (H + 2, W + 2), so
that an outline can be traced up to the image border. The intersection of two regions is the maximum of their
fields, the union the minimum, the complement the negative; so occlusion is exact below the size of a pixel.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from PIL import Image

Array: TypeAlias = np.ndarray

_STAR_OUTER, _STAR_INNER = 1.25, 0.56
_TRIANGLE_INRADIUS = 0.66
_SQUARE_HALF = 0.88
_CROSS_LONG, _CROSS_SHORT = 1.08, 0.38
_RING_OUTER, _RING_INNER = 1.05, 0.5


def _disk(x: Array, y: Array) -> Array:
    return np.hypot(x, y) - 1.0


def _square(x: Array, y: Array) -> Array:
    return np.maximum(np.abs(x), np.abs(y)) - _SQUARE_HALF


def _triangle(x: Array, y: Array) -> Array:
    return np.maximum(y, np.abs(x) * np.sqrt(0.75) - 0.5 * y) - _TRIANGLE_INRADIUS


def _star(x: Array, y: Array) -> Array:
    # By symmetry one edge says it all: fold the plane into the wedge between a tip and the notch beside it.
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


@dataclass(frozen=True)
class Shape:
    """One class of the data set: its name, its unit outline as a field of (x, y), and the area inside it."""

    name: str
    outline: Callable[[Array, Array], Array]
    area: float


SHAPES: tuple[Shape, ...] = (
    Shape("disk", _disk, np.pi),
    Shape("square", _square, 4 * _SQUARE_HALF**2),
    Shape("triangle", _triangle, 3 * np.sqrt(3) * _TRIANGLE_INRADIUS**2),
    Shape("star", _star, 5 * _STAR_OUTER * _STAR_INNER * np.sin(np.pi / 5)),
    Shape("cross", _cross, 8 * _CROSS_LONG * _CROSS_SHORT - 4 * _CROSS_SHORT**2),
    Shape("ring", _ring, np.pi * (_RING_OUTER**2 - _RING_INNER**2)),
)


@dataclass
class Layer:
    """One annotated thing of a scene.

    Args:
        category: index into `SHAPES`.
        region: field, (H + 2, W + 2), where the thing is before anything occludes it.
        area: area in pixels of the whole thing, the part outside the image included.
        crowd: True for a group of small shapes that is annotated as one region.
        visible: field, (H + 2, W + 2), where the thing is seen: inside the image and under nothing.
    """

    category: int
    region: Array
    area: float
    crowd: bool = False
    visible: Array = field(init=False)

    @property
    def mask(self) -> Array:
        """(H, W) bool, the pixels whose centre shows the thing."""
        return self.visible[1:-1, 1:-1] < 0


class Scene:
    """A canvas on which shapes are painted back to front; `layers` holds what must be annotated.

    Args:
        height: H.
        width: W.
        rng: source of everything random; the same state gives the same scene.
        min_visible: smallest part of a thing's whole area, in (0, 1], that must stay visible.
        hue_spread: range of a shape's hue about its class's own, in [0, 1] of the colour circle.
    """

    def __init__(
        self, height: int, width: int, rng: np.random.Generator, min_visible: float, hue_spread: float
    ) -> None:
        self.rng = rng
        self.min_visible = min_visible
        self.hue_spread = hue_spread
        self.layers: list[Layer] = []
        self.short = min(height, width)
        rows, columns = np.mgrid[-1 : height + 1, -1 : width + 1].astype(np.float64) + 0.5
        self._x, self._y = columns, rows
        self._frame = np.maximum(np.maximum(-columns, columns - width), np.maximum(-rows, rows - height))
        self._canvas = self._background()

    def image(self) -> Array:
        """Return the picture, (H, W, 3) uint8 RGB, with a little sensor noise."""
        inner = self._canvas[1:-1, 1:-1]
        noisy = inner + self.rng.normal(0.0, self.rng.uniform(1.0, 5.0), inner.shape)
        return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)

    def add_object(self, category: int, size: float) -> bool:
        """Try to put one shape at a random place; False if too much of it or of another would be hidden.

        Args:
            category: index into `SHAPES`.
            size: about the side of the shape's box, in pixels.
        """
        height, width = self._frame.shape
        centre = self.rng.uniform(0.05, 0.95, 2) * (width - 2, height - 2)
        outline, local, area = self._place(category, size / 2, centre)
        if not self._push(Layer(category, outline, area)):
            return False
        self._paint(outline, self._texture(category, *local, size / 2))
        return True

    def add_crowd(self, category: int) -> bool:
        """Try to put a cluster of many small shapes of one class, to be annotated as one crowd region."""
        height, width = self._frame.shape
        radius = max(3.0, self.short * self.rng.uniform(0.03, 0.045))
        spread = radius * self.rng.uniform(3.5, 5.0)
        middle = self.rng.uniform(0.2, 0.8, 2) * (width - 2, height - 2)
        members = []
        for _ in range(int(self.rng.integers(9, 16))):
            turn, distance = self.rng.uniform(0, 2 * np.pi), spread * np.sqrt(self.rng.uniform())
            centre = middle + distance * np.array([np.cos(turn), np.sin(turn)])
            members.append(self._place(category, radius * self.rng.uniform(0.8, 1.2), centre)[0])
        # As in COCO the region is generous: it holds the shapes and a rim about them.
        region = np.minimum.reduce(members) - 0.35 * radius
        if not self._push(Layer(category, region, float((region < 0).sum()), crowd=True)):
            return False
        for member in members:
            colour = self._colour(self._hue(category), (0.6, 1.0), (0.55, 1.0))
            self._paint(member, np.broadcast_to(colour, (*member.shape, 3)))
        return True

    def _place(self, category: int, radius: float, centre: Array) -> tuple[Array, tuple[Array, Array], float]:
        """Return a randomly turned and stretched shape: its field, its own (x, y) in pixels, and its area."""
        shape = SHAPES[category]
        turn = self.rng.uniform(0, 2 * np.pi)
        stretch_x, stretch_y = self.rng.uniform(0.87, 1.13, 2)
        dx, dy = self._x - centre[0], self._y - centre[1]
        local_x = (np.cos(turn) * dx + np.sin(turn) * dy) / stretch_x
        local_y = (np.cos(turn) * dy - np.sin(turn) * dx) / stretch_y
        outline = shape.outline(local_x / radius, local_y / radius) * radius
        return outline, (local_x, local_y), shape.area * radius**2 * stretch_x * stretch_y

    def _push(self, layer: Layer) -> bool:
        """Put a layer on top unless it, or one below it, would keep too little of its area visible."""
        layer.visible = np.maximum(layer.region, self._frame)
        below = [np.maximum(other.visible, -layer.region) for other in self.layers]
        for other, visible in zip([*self.layers, layer], [*below, layer.visible], strict=True):
            if (visible < 0).sum() < self.min_visible * other.area:
                return False
        for other, visible in zip(self.layers, below, strict=True):
            other.visible = visible
        self.layers.append(layer)
        return True

    def _paint(self, outline: Array, colours: Array, opacity: float = 1.0) -> None:
        """Cover the region of a field by colours (H + 2, W + 2, 3), with an anti-aliased edge."""
        coverage = (opacity * np.clip(0.5 - outline, 0.0, 1.0))[..., None]
        self._canvas += coverage * (colours - self._canvas)

    def _background(self) -> Array:
        """Return a colour gradient with clouds, grain, ragged blobs and line segments: no class."""
        first, second = (self._muted_colour() for _ in range(2))
        self._canvas = _blend(self._ramp(), first, second)
        clouds = self._noise(int(self.rng.integers(3, 12))) - 0.5
        self._canvas += clouds[..., None] * (self.rng.uniform(-60, 60) + self.rng.uniform(-15, 15, 3))
        grain = self._noise(self.short // 3) - 0.5
        self._canvas += grain[..., None] * self.rng.uniform(0, 45)
        for _ in range(self.rng.integers(1, 5)):
            self._blob()
        for _ in range(self.rng.integers(2, 9)):
            self._line_segment()
        return self._canvas

    def _blob(self) -> None:
        height, width = self._frame.shape
        x, y = self.rng.uniform(0, 1, 2) * (width, height)
        radius = self.short * self.rng.uniform(0.08, 0.3)
        ragged = np.hypot(self._x - x, self._y - y) / radius + 2.0 * self._noise(9) - 2.0
        colour = np.broadcast_to(self._muted_colour(), self._canvas.shape)
        self._paint(ragged * self.rng.uniform(1.0, 4.0), colour, opacity=self.rng.uniform(0.3, 0.8))

    def _line_segment(self) -> None:
        height, width = self._frame.shape
        start = self.rng.uniform(-0.1, 1.1, 2) * (width, height)
        turn, length = self.rng.uniform(0, 2 * np.pi), self.short * self.rng.uniform(0.15, 0.8)
        step = length * np.array([np.cos(turn), np.sin(turn)])
        dx, dy = self._x - start[0], self._y - start[1]
        along = np.clip((dx * step[0] + dy * step[1]) / length**2, 0, 1)
        distance = np.hypot(dx - along * step[0], dy - along * step[1])
        thickness = max(0.5, self.short * self.rng.uniform(0.003, 0.012))
        colour = np.broadcast_to(self.rng.uniform(10, 245, 3), self._canvas.shape)
        self._paint(distance - thickness, colour, opacity=self.rng.uniform(0.5, 1.0))

    def _texture(self, category: int, x: Array, y: Array, radius: float) -> Array:
        """Return the colours (H + 2, W + 2, 3) of a random two-coloured texture that turns with its shape."""
        hue = self._hue(category)
        first = self._colour(hue, (0.7, 1.0), (0.7, 1.0))
        second = self._colour(hue + self.rng.uniform(-0.06, 0.06), (0.5, 0.9), (0.45, 0.8))
        period = max(5.0, radius * self.rng.uniform(0.35, 0.8))
        waves = np.sin(2 * np.pi * x / period), np.sin(2 * np.pi * y / period)
        match self.rng.integers(6):
            case 0:
                mix = np.zeros_like(x)
            case 1:
                mix = np.clip(0.5 + 3 * waves[0], 0, 1)
            case 2:
                mix = np.clip(0.5 + 4 * waves[0] * waves[1], 0, 1)
            case 3:
                mix = self._noise(max(4, int(2 * self.short / period)))
            case 4:
                mix = np.clip(0.5 + 0.5 * x / radius, 0, 1)
            case _:
                mix = np.clip(np.hypot(x, y) / radius, 0, 1)
        return _blend(mix, first, second)

    def _hue(self, category: int) -> float:
        return category / len(SHAPES) + self.hue_spread * self.rng.uniform(-0.5, 0.5)

    def _muted_colour(self) -> Array:
        return self._colour(self.rng.uniform(), (0.0, 0.3), (0.2, 0.85))

    def _colour(self, hue: float, saturation: tuple[float, float], value: tuple[float, float]) -> Array:
        """Return an RGB colour (3,) in 0 ... 255 of a hue, in turns, with the rest drawn from two ranges."""
        return 255 * np.array(colorsys.hsv_to_rgb(hue % 1, self.rng.uniform(*saturation), self.rng.uniform(*value)))

    def _ramp(self) -> Array:
        """Return a linear ramp from 0 to 1 across the canvas in a random direction, (H + 2, W + 2)."""
        turn = self.rng.uniform(0, 2 * np.pi)
        ramp = np.cos(turn) * self._x + np.sin(turn) * self._y
        return (ramp - ramp.min()) / np.ptp(ramp)

    def _noise(self, cells: int) -> Array:
        """Return smooth noise in [0, 1], (H + 2, W + 2), with about `cells` bumps along each side."""
        height, width = self._frame.shape
        coarse = Image.fromarray(self.rng.uniform(0, 1, (cells + 1, cells + 1)).astype(np.float32))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float64)
        return np.clip(smooth, 0, 1)


def _blend(mix: Array, first: Array, second: Array) -> Array:
    return first + mix[..., None] * (second - first)
