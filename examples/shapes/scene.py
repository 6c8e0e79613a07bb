"""Scenes of textured shapes on a cluttered background.

A region is a signed distance field (SDF) in pixels, negative inside. It is sampled at pixel centers
on a grid one pixel wider than the image on every side, (H + 2, W + 2), so that its contour closes at
the image border. The maximum of two fields is their intersection, the minimum their union, the
negative the complement: occlusion is exact below a pixel.

The order of the random numbers is part of the dataset: another order gives other images.
"""

import colorsys
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from PIL import Image

from .outlines import SHAPES, Array, Shape

Range = tuple[float, float]


@dataclass
class SceneObject:
    """An annotated object, or a crowd: many small shapes annotated as one region.

    ``area`` counts all pixels of the object, ``visible`` (H + 2, W + 2) is its part inside the image
    and not occluded.
    """

    category: int  # index into Scene.shapes
    visible: Array
    area: float
    crowd: bool

    @property
    def mask(self) -> Array:
        """The visible pixels, (H, W) bool."""
        return self.visible[1:-1, 1:-1] < 0


class Placed(NamedTuple):
    """A shape at its place: region, the shape's own coordinates in pixels, and area."""

    region: Array
    x: Array
    y: Array
    area: float


class Scene:
    """Canvas of H x W pixels on which shapes are painted back to front.

    See :class:`ShapesConfig` for ``min_visible`` and ``hue_spread``.
    """

    shapes: ClassVar[tuple[Shape, ...]] = SHAPES

    def __init__(
        self,
        height: int,
        width: int,
        rng: np.random.Generator,
        min_visible: float,
        hue_spread: float,
    ) -> None:
        self.rng = rng
        self.uniform = rng.uniform
        self.min_visible = min_visible
        self.hue_spread = hue_spread
        self.objects: list[SceneObject] = []
        self.short = min(height, width)
        self._size = np.array([width, height])

        columns = np.arange(-1, width + 1) + 0.5
        rows = np.arange(-1, height + 1) + 0.5
        x, y = np.meshgrid(columns, rows)
        self._x = x
        self._y = y
        self._frame = np.maximum.reduce([-x, x - width, -y, y - height])

        self._canvas: Array
        self._paint_background()

    def image(self) -> Array:
        """Return the image with sensor noise, (H, W, 3) uint8 RGB."""
        inner = self._exposed()[1:-1, 1:-1]
        strength = self.uniform(1.0, 5.0)
        noise = self.rng.normal(0.0, strength, inner.shape)
        noisy = inner + noise
        return noisy.round().clip(0, 255).astype(np.uint8)

    def add_object(self, category: int, size: float) -> bool:
        """Add a shape of about ``size`` pixels at a random place.

        Return False, and add none, if too much of an object would be hidden.
        """
        center = self.uniform(0.05, 0.95, 2) * self._size
        placed = self._place(category, size / 2, center)
        if not self._add(category, placed.region, placed.area):
            return False

        colors = self._texture(category, placed.x, placed.y, size / 2)
        self._paint(placed.region, colors)
        return True

    def add_crowd(self, category: int) -> bool:
        """Try to add a crowd; return False as :meth:`add_object` does."""
        radius = self.short * self.uniform(0.03, 0.045)
        radius = max(3.0, radius)
        spread = radius * self.uniform(3.5, 5.0)
        middle = self.uniform(0.2, 0.8, 2) * self._size

        members = []
        for _ in range(self.rng.integers(9, 16)):
            angle = self._angle()
            distance = spread * np.sqrt(self.uniform())
            center = middle + distance * direction(angle)
            size = radius * self.uniform(0.8, 1.2)
            members.append(self._place(category, size, center).region)

        # As in COCO the region is generous: it includes a margin around the shapes.
        region = np.minimum.reduce(members) - 0.35 * radius
        area = (region < 0).sum()
        if not self._add(category, region, area, crowd=True):
            return False

        for member in members:
            hue = self._hue(category)
            color = self._color(hue, (0.6, 1.0), (0.55, 1.0))
            self._paint(member, color)
        return True

    def _exposed(self) -> Array:
        """Return the canvas as a camera sees it."""
        return self._canvas

    def _place(self, category: int, radius: float, center: Array) -> Placed:
        """Rotate and stretch a shape at random around ``center``."""
        shape = self.shapes[category]
        angle = self._angle()
        stretch_x, stretch_y = self.uniform(0.87, 1.13, 2)

        x, y = self._rotated(center, angle)
        x = x / stretch_x
        y = y / stretch_y
        region = shape.sdf(x / radius, y / radius) * radius
        area = shape.area * radius**2 * stretch_x * stretch_y
        return Placed(region, x, y, area)

    def _relative_to(self, point: Array) -> tuple[Array, Array]:
        """Return the distances x and y of all pixels from a point."""
        x, y = point
        return self._x - x, self._y - y

    def _rotated(self, center: Array, angle: float) -> tuple[Array, Array]:
        """Return x and y of all pixels in a system of coordinates at ``center``."""
        cos, sin = direction(angle)
        x, y = self._relative_to(center)
        along = cos * x + sin * y
        across = cos * y - sin * x
        return along, across

    def _add(
        self, category: int, region: Array, area: float, crowd: bool = False
    ) -> bool:
        """Put an object on top unless it, at the border, or one below would be hidden too much."""
        visible = np.maximum(region, self._frame)
        new = SceneObject(category, visible, area, crowd)
        if self._is_hidden(new, visible) or not self._cover(region):
            return False
        self.objects.append(new)
        return True

    def _cover(self, region: Array) -> bool:
        """Hide a region of all objects unless one of them would be hidden too much."""
        rest = [np.maximum(below.visible, -region) for below in self.objects]
        if any(map(self._is_hidden, self.objects, rest)):
            return False
        for below, visible in zip(self.objects, rest, strict=True):
            below.visible = visible
        return True

    def _is_hidden(self, shown: SceneObject, visible: Array) -> bool:
        pixels = (visible < 0).sum()
        return pixels < self.min_visible * shown.area

    def _paint(self, region: Array, colors: Array, opacity: float = 1.0) -> None:
        """Blend colors, (3,) or (H + 2, W + 2, 3), into a region with an anti-aliased edge."""
        coverage = opacity * (0.5 - region).clip(0.0, 1.0)
        change = colors - self._canvas
        self._canvas += coverage[..., None] * change

    def _paint_background(self) -> None:
        """Paint a color gradient with clouds, grain, ragged blobs and line segments."""
        first = self._muted_color()
        second = self._muted_color()
        ramp, _ = self._rotated(np.zeros(2), self._angle())
        ramp -= ramp.min()
        self._canvas = blend(ramp / ramp.max(), first, second)

        cells = int(self.rng.integers(3, 12))
        clouds = self._noise(cells) - 0.5
        gray = self.uniform(-60, 60)
        tint = self.uniform(-15, 15, 3)
        self._canvas += clouds[..., None] * (gray + tint)

        grain = self._noise(self.short // 3) - 0.5
        strength = self.uniform(0, 45)
        self._canvas += grain[..., None] * strength

        for _ in range(self.rng.integers(1, 5)):
            self._paint_blob()
        for _ in range(self.rng.integers(2, 9)):
            self._paint_line_segment()

    def _paint_blob(self) -> None:
        x, y = self._relative_to(self._point(0, 1))
        radius = self.short * self.uniform(0.08, 0.3)
        distance = np.hypot(x, y) / radius
        ragged = distance + 2.0 * self._noise(9) - 2.0
        color = self._muted_color()

        sharpness = self.uniform(1.0, 4.0)
        opacity = self.uniform(0.3, 0.8)
        self._paint(ragged * sharpness, color, opacity)

    def _paint_line_segment(self) -> None:
        x, y = self._relative_to(self._point(-0.1, 1.1))
        angle = self._angle()
        length = self.short * self.uniform(0.15, 0.8)
        step_x, step_y = length * direction(angle)

        along = (x * step_x + y * step_y) / length**2
        along = along.clip(0, 1)
        x -= along * step_x
        y -= along * step_y
        distance = np.hypot(x, y)

        thickness = self.short * self.uniform(0.003, 0.012)
        thickness = max(0.5, thickness)
        color = self.uniform(10, 245, 3)
        opacity = self.uniform(0.5, 1.0)
        self._paint(distance - thickness, color, opacity)

    def _texture(self, category: int, x: Array, y: Array, radius: float) -> Array:
        """Return a random two-color texture, (H + 2, W + 2, 3), at an object's own coordinates."""
        hue = self._hue(category)
        first = self._color(hue, (0.7, 1.0), (0.7, 1.0))
        hue += self.uniform(-0.06, 0.06)
        second = self._color(hue, (0.5, 0.9), (0.45, 0.8))

        period = max(5.0, radius * self.uniform(0.35, 0.8))
        wave_x = np.sin(2 * np.pi * x / period)
        wave_y = np.sin(2 * np.pi * y / period)

        match self.rng.integers(6):
            case 0:
                mix = np.zeros_like(x)
            case 1:
                mix = 0.5 + 3 * wave_x
            case 2:
                mix = 0.5 + 4 * wave_x * wave_y
            case 3:
                cells = int(2 * self.short / period)
                mix = self._noise(max(4, cells))
            case 4:
                mix = 0.5 + 0.5 * x / radius
            case _:
                mix = np.hypot(x, y) / radius
        return blend(mix.clip(0, 1), first, second)

    def _point(self, low: float, high: float) -> Array:
        """Draw x and y as fractions of the image; return pixels."""
        return self.uniform(low, high, 2) * (self._size + 2)

    def _angle(self) -> float:
        return self.uniform(0, 2 * np.pi)

    def _hue(self, category: int) -> float:
        center = category / len(self.shapes)
        return center + self.hue_spread * self.uniform(-0.5, 0.5)

    def _muted_color(self) -> Array:
        hue = self.uniform()
        return self._color(hue, (0.0, 0.3), (0.2, 0.85))

    def _color(self, hue: float, saturations: Range, values: Range) -> Array:
        """Draw saturation and value from ranges; return an RGB color (3,) in 0 ... 255."""
        saturation = self.uniform(*saturations)
        value = self.uniform(*values)
        color = colorsys.hsv_to_rgb(hue % 1, saturation, value)
        return 255 * np.array(color)

    def _noise(self, cells: int) -> Array:
        """Return smooth noise in [0, 1], (H + 2, W + 2), with about ``cells`` bumps along each side."""
        points = cells + 1
        values = self.uniform(0, 1, (points, points))
        coarse = Image.fromarray(values.astype(np.float32))

        height, width = self._x.shape
        smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(smooth, dtype=np.float64).clip(0, 1)


def direction(angle: float) -> Array:
    """Return the unit vector x, y of an angle."""
    return np.array([np.cos(angle), np.sin(angle)])


def blend(mix: Array, first: Array, second: Array) -> Array:
    """Mix two colors; ``mix`` (H, W) in [0, 1] is the share of the second."""
    return first + mix[..., None] * (second - first)
