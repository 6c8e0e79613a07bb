"""Scenes of the synthetic dataset: textured shapes on a cluttered background.

A region is a signed distance field (SDF) in pixels, negative inside. It is sampled at pixel centers on a grid one pixel
wider than the image on every side, (H + 2, W + 2), so that its contour closes at the image border. The maximum of two
fields is their intersection, the minimum their union, the negative the complement: occlusion is exact below a pixel.
"""

import colorsys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

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
    """A class of objects: SDF and area of its unit shape."""

    name: str
    sdf: Callable[[Array, Array], Array]
    area: float


SHAPES: tuple[Shape, ...] = (
    Shape("disk", lambda x, y: np.hypot(x, y) - 1.0, np.pi),
    Shape(
        "square",
        lambda x, y: np.maximum(np.abs(x), np.abs(y)) - _SQUARE_HALF,
        4 * _SQUARE_HALF**2,
    ),
    Shape(
        "triangle",
        lambda x, y: np.maximum(y, np.abs(x) * np.sqrt(0.75) - 0.5 * y) - _TRIANGLE_INRADIUS,
        3 * np.sqrt(3) * _TRIANGLE_INRADIUS**2,
    ),
    Shape("star", _star, 5 * _STAR_OUTER * _STAR_INNER * np.sin(np.pi / 5)),
    Shape("cross", _cross, 8 * _CROSS_LONG * _CROSS_SHORT - 4 * _CROSS_SHORT**2),
    Shape("ring", _ring, np.pi * (_RING_OUTER**2 - _RING_INNER**2)),
)


@dataclass
class SceneObject:
    """An annotated object, or a crowd: many small shapes annotated as one region.

    ``area`` counts all pixels of the object, ``visible`` (H + 2, W + 2) is its part inside the image and not occluded.
    """

    category: int  # index into Scene.shapes
    region: Array
    area: float
    crowd: bool = False
    visible: Array = field(init=False)

    @property
    def mask(self) -> Array:
        """The visible pixels, (H, W) bool."""
        return self.visible[1:-1, 1:-1] < 0


class Scene:
    """Canvas of H x W pixels on which shapes are painted back to front; see :class:`SyntheticConfig` for the rest."""

    shapes: ClassVar[tuple[Shape, ...]] = SHAPES

    def __init__(
        self,
        height: int,
        width: int,
        rng: np.random.Generator,
        min_visible: float,
        hue_spread: float,
    ) -> None:
        self.rng, self.min_visible, self.hue_spread = rng, min_visible, hue_spread
        self.objects: list[SceneObject] = []
        self.short = min(height, width)
        self._size = np.array([width, height])
        self._y, self._x = np.mgrid[-1 : height + 1, -1 : width + 1].astype(np.float64) + 0.5
        self._frame = np.maximum(
            np.maximum(-self._x, self._x - width), np.maximum(-self._y, self._y - height)
        )
        self._canvas = self._paint_background()

    def image(self) -> Array:
        """Return the image with sensor noise, (H, W, 3) uint8 RGB."""
        inner = self._exposed()[1:-1, 1:-1]
        noisy = inner + self.rng.normal(0.0, self.rng.uniform(1.0, 5.0), inner.shape)
        return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)

    def add_object(self, category: int, size: float) -> bool:
        """Add a shape of about ``size`` pixels at a random place, unless too much of an object would be hidden."""
        center = self.rng.uniform(0.05, 0.95, 2) * self._size
        region, local, area = self._transform(category, size / 2, center)
        if not self._add(SceneObject(category, region, area)):
            return False
        self._paint(region, self._texture(category, *local, size / 2))
        return True

    def add_crowd(self, category: int) -> bool:
        """Try to add a crowd; return False as :meth:`add_object` does."""
        radius = max(3.0, self.short * self.rng.uniform(0.03, 0.045))
        spread = radius * self.rng.uniform(3.5, 5.0)
        middle = self.rng.uniform(0.2, 0.8, 2) * self._size
        members = []
        for _ in range(int(self.rng.integers(9, 16))):
            angle, distance = (
                self.rng.uniform(0, 2 * np.pi),
                spread * np.sqrt(self.rng.uniform()),
            )
            center = middle + distance * np.array([np.cos(angle), np.sin(angle)])
            members.append(
                self._transform(category, radius * self.rng.uniform(0.8, 1.2), center)[0]
            )
        # As in COCO the region is generous: it includes a margin around the shapes.
        region = np.minimum.reduce(members) - 0.35 * radius
        if not self._add(SceneObject(category, region, float((region < 0).sum()), crowd=True)):
            return False
        for member in members:
            self._paint(member, self._color(self._hue(category), (0.6, 1.0), (0.55, 1.0)))
        return True

    def _exposed(self) -> Array:
        """Return the canvas as a camera sees it."""
        return self._canvas

    def _transform(
        self, category: int, radius: float, center: Array
    ) -> tuple[Array, tuple[Array, Array], float]:
        """Rotate and stretch a shape at random; return its SDF, its local (x, y) in pixels, and its area."""
        shape = self.shapes[category]
        angle = self.rng.uniform(0, 2 * np.pi)
        stretch_x, stretch_y = self.rng.uniform(0.87, 1.13, 2)
        dx, dy = self._x - center[0], self._y - center[1]
        local_x = (np.cos(angle) * dx + np.sin(angle) * dy) / stretch_x
        local_y = (np.cos(angle) * dy - np.sin(angle) * dx) / stretch_y
        sdf = shape.sdf(local_x / radius, local_y / radius) * radius
        return sdf, (local_x, local_y), shape.area * radius**2 * stretch_x * stretch_y

    def _add(self, new: SceneObject) -> bool:
        """Put an object on top unless it, at the image border, or one below would be hidden too much."""
        new.visible = np.maximum(new.region, self._frame)
        if self._is_hidden(new, new.visible) or not self._cover(new.region):
            return False
        self.objects.append(new)
        return True

    def _cover(self, region: Array) -> bool:
        """Hide a region of all objects unless one of them would be hidden too much."""
        visible = [np.maximum(obj.visible, -region) for obj in self.objects]
        if any(map(self._is_hidden, self.objects, visible)):
            return False
        for obj, sdf in zip(self.objects, visible, strict=True):
            obj.visible = sdf
        return True

    def _is_hidden(self, obj: SceneObject, visible: Array) -> bool:
        return bool((visible < 0).sum() < self.min_visible * obj.area)

    def _paint(self, sdf: Array, colors: Array, opacity: float = 1.0) -> None:
        """Blend colors, (3,) or (H + 2, W + 2, 3), into a region with an anti-aliased edge."""
        coverage = (opacity * np.clip(0.5 - sdf, 0.0, 1.0))[..., None]
        self._canvas += coverage * (colors - self._canvas)

    def _paint_background(self) -> Array:
        """Paint a color gradient with clouds, grain, ragged blobs and line segments."""
        first, second = (self._muted_color() for _ in range(2))
        angle = self.rng.uniform(0, 2 * np.pi)
        ramp = np.cos(angle) * self._x + np.sin(angle) * self._y
        self._canvas = blend((ramp - ramp.min()) / np.ptp(ramp), first, second)
        clouds = self._noise(int(self.rng.integers(3, 12))) - 0.5
        self._canvas += clouds[..., None] * (
            self.rng.uniform(-60, 60) + self.rng.uniform(-15, 15, 3)
        )
        grain = self._noise(self.short // 3) - 0.5
        self._canvas += grain[..., None] * self.rng.uniform(0, 45)
        for _ in range(self.rng.integers(1, 5)):
            self._paint_blob()
        for _ in range(self.rng.integers(2, 9)):
            self._paint_line_segment()
        return self._canvas

    def _paint_blob(self) -> None:
        x, y = self.rng.uniform(0, 1, 2) * (self._size + 2)
        radius = self.short * self.rng.uniform(0.08, 0.3)
        ragged = np.hypot(self._x - x, self._y - y) / radius + 2.0 * self._noise(9) - 2.0
        color = self._muted_color()
        self._paint(
            ragged * self.rng.uniform(1.0, 4.0), color, opacity=self.rng.uniform(0.3, 0.8)
        )

    def _paint_line_segment(self) -> None:
        start = self.rng.uniform(-0.1, 1.1, 2) * (self._size + 2)
        angle, length = self.rng.uniform(0, 2 * np.pi), self.short * self.rng.uniform(0.15, 0.8)
        step = length * np.array([np.cos(angle), np.sin(angle)])
        dx, dy = self._x - start[0], self._y - start[1]
        along = np.clip((dx * step[0] + dy * step[1]) / length**2, 0, 1)
        distance = np.hypot(dx - along * step[0], dy - along * step[1])
        thickness = max(0.5, self.short * self.rng.uniform(0.003, 0.012))
        color = self.rng.uniform(10, 245, 3)
        self._paint(distance - thickness, color, opacity=self.rng.uniform(0.5, 1.0))

    def _texture(self, category: int, x: Array, y: Array, radius: float) -> Array:
        """Return a random two-color texture, (H + 2, W + 2, 3), at an object's local coordinates."""
        hue = self._hue(category)
        first = self._color(hue, (0.7, 1.0), (0.7, 1.0))
        second = self._color(hue + self.rng.uniform(-0.06, 0.06), (0.5, 0.9), (0.45, 0.8))
        period = max(5.0, radius * self.rng.uniform(0.35, 0.8))
        waves = np.sin(2 * np.pi * x / period), np.sin(2 * np.pi * y / period)
        match self.rng.integers(6):
            case 0:
                mix = np.zeros_like(x)
            case 1:
                mix = 0.5 + 3 * waves[0]
            case 2:
                mix = 0.5 + 4 * waves[0] * waves[1]
            case 3:
                mix = self._noise(max(4, int(2 * self.short / period)))
            case 4:
                mix = 0.5 + 0.5 * x / radius
            case _:
                mix = np.hypot(x, y) / radius
        return blend(np.clip(mix, 0, 1), first, second)

    def _hue(self, category: int) -> float:
        return category / len(self.shapes) + self.hue_spread * self.rng.uniform(-0.5, 0.5)

    def _muted_color(self) -> Array:
        return self._color(self.rng.uniform(), (0.0, 0.3), (0.2, 0.85))

    def _color(
        self, hue: float, saturation: tuple[float, float], value: tuple[float, float]
    ) -> Array:
        """Draw saturation and value from ranges; return an RGB color (3,) in 0 ... 255."""
        return 255 * np.array(
            colorsys.hsv_to_rgb(
                hue % 1, self.rng.uniform(*saturation), self.rng.uniform(*value)
            )
        )

    def _noise(self, cells: int) -> Array:
        """Return smooth noise in [0, 1], (H + 2, W + 2), with about ``cells`` bumps along each side."""
        coarse = Image.fromarray(
            self.rng.uniform(0, 1, (cells + 1, cells + 1)).astype(np.float32)
        )
        size = (self._x.shape[1], self._x.shape[0])
        smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.float64)
        return np.clip(smooth, 0, 1)


def blend(mix: Array, first: Array, second: Array) -> Array:
    """Mix two colors; ``mix`` (H, W) in [0, 1] is the share of the second."""
    return first + mix[..., None] * (second - first)
