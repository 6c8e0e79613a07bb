"""Dataset of the study, ``gw_synthetic_hard``: scenes whose classes differ by shape and texture together.

Every shape is drawn with every texture. Some of the pairs are classes; the others are look-alikes,
which are part of the background. So neither the outline nor the texture alone tells the class, and
the color tells nothing.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image, ImageFilter

from examples.shapes import ShapesConfig, write_shapes
from examples.shapes.outlines import SHAPES, Array, Shape
from examples.shapes.scene import Scene, blend
from gw_detectron.workbench.console import errors_reported


def _dots(x: Array, y: Array) -> Array:
    return 0.5 + 6 * (0.32 - np.hypot(x - np.rint(x), y - np.rint(y)))


#: share of the second color at (x, y), in periods of the texture; below 0 is 0, above 1 is 1
TEXTURES: dict[str, Callable[[Array, Array], Array]] = {
    "plain": lambda x, y: np.zeros_like(x),
    "striped": lambda x, y: 0.5 + 3 * np.sin(2 * np.pi * x),
    "checkered": lambda x, y: 0.5 + 4 * np.sin(np.pi * x) * np.sin(np.pi * y),
    "dotted": _dots,
}
_CLASSES = (
    *(
        ("striped", "disk"),
        ("dotted", "disk"),
        ("striped", "square"),
        ("checkered", "square"),
    ),
    *(
        ("dotted", "triangle"),
        ("checkered", "triangle"),
        ("plain", "star"),
        ("plain", "cross"),
    ),
)
_SHAPES = {shape.name: shape for shape in SHAPES}
# the classes first
_KINDS = _CLASSES + tuple(
    kind for kind in itertools.product(TEXTURES, _SHAPES) if kind not in _CLASSES
)

_MOST_LOOK_ALIKES = 1
_BAR_PROBABILITY = 0.1  # after each object
_SHADOW_PROBABILITY = 0.3
_SMALLEST_PERIOD = 5.5  # pixels


class HardScene(Scene):
    """Scene with look-alikes, bars in front of objects, uneven light, haze and blur.

    ``shapes`` are the classes and then the look-alikes.
    """

    shapes: ClassVar[tuple[Shape, ...]] = tuple(
        _SHAPES[shape]._replace(name=f"{texture} {shape}") for texture, shape in _KINDS
    )
    num_classes: ClassVar[int] = len(_CLASSES)

    def add_object(self, category: int, size: float) -> bool:
        added = super().add_object(category, size)
        if added and self.rng.uniform() < _BAR_PROBABILITY:
            self._add_bar()
        return added

    def _paint_background(self) -> None:
        super()._paint_background()
        for _ in range(self.rng.integers(_MOST_LOOK_ALIKES + 1)):
            category = int(self.rng.integers(self.num_classes, len(self.shapes)))
            radius = self.short * self.rng.uniform(0.05, 0.25)
            placed = self._place(
                category, radius, self.rng.uniform(0, 1, 2) * self._size
            )
            self._paint(
                placed.region, self._texture(category, placed.x, placed.y, radius)
            )

    def _add_bar(self) -> None:
        """Try to put a bar across the last object."""
        rows, columns = np.nonzero(self.objects[-1].mask)
        start = int(self.rng.integers(len(rows)))
        angle = self._angle()
        length = self.short * self.rng.uniform(0.2, 0.8)
        half_width = max(1.0, self.short * self.rng.uniform(0.005, 0.03))
        center = np.array([columns[start] + 0.5, rows[start] + 0.5])
        along, across = self._rotated(center, angle)
        region = np.maximum(np.abs(along) - length, np.abs(across) - half_width)
        if self._cover(region):
            self._paint(region, self._muted_color())

    def _texture(self, category: int, x: Array, y: Array, radius: float) -> Array:
        colors = (
            self._color(self._hue(category), (0.0, 0.6), (0.8, 1.0)),
            self._color(self._hue(category), (0.0, 0.9), (0.05, 0.3)),
        )
        bright, dark = colors if self.rng.uniform() < 0.5 else colors[::-1]
        period = max(_SMALLEST_PERIOD, radius * self.rng.uniform(0.35, 0.6))
        mix = TEXTURES[_KINDS[category][0]](x / period, y / period)
        return blend(np.clip(mix, 0, 1), bright, dark)

    def _exposed(self) -> Array:
        """Return the canvas under uneven colored light, with a shadow, haze and blur."""
        light = self.rng.uniform(0.65, 1.15) * (
            1 + self.rng.uniform(0, 1.0) * (self._noise(2) - 0.5)
        )
        if self.rng.uniform() < _SHADOW_PROBABILITY:
            edge = self.short * (self._noise(3) - self.rng.uniform(0.3, 0.7)) / 2
            light *= 1 - self.rng.uniform(0.2, 0.5) * np.clip(
                0.5 + edge / self.rng.uniform(1, 6), 0, 1
            )
        lit = self._canvas * light[..., None] * self.rng.uniform(0.85, 1.15, 3)
        hazy = blend(
            np.full_like(light, self.rng.uniform(0, 0.2)),
            lit,
            np.array(self.rng.uniform(60, 200)),
        )
        image = Image.fromarray(np.clip(np.rint(hazy), 0, 255).astype(np.uint8))
        blurred = image.filter(ImageFilter.GaussianBlur(self.rng.uniform(0, 0.8)))
        return np.asarray(blurred, dtype=np.float64)


@dataclass(frozen=True)
class HardShapesConfig(ShapesConfig):
    """Parameters of the dataset.

    Learning rates are chosen on the split "tune", so that "val" is only scored.
    """

    num_train: int = 4000
    num_val: int = 500
    min_side: int = 192
    max_side: int = 192
    min_objects: int = 2
    max_objects: int = 6
    min_size: float = 1 / 12  # 16 of 192 pixels
    max_size: float = 1.0
    min_visible: float = 0.65
    hue_spread: float = 1.0
    crowd_fraction: float = 0.0
    num_tune: int = 500

    name: ClassVar[str] = "gw_synthetic_hard"
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "tune")
    scene: ClassVar[type[Scene]] = HardScene
    class_names: ClassVar[tuple[str, ...]] = tuple(
        shape.name for shape in HardScene.shapes[: HardScene.num_classes]
    )
    size_exponent: ClassVar[float] = 1.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Draw the images of the study, with annotations in COCO format."
    )
    parser.add_argument("folder", help="new folder of the dataset")
    with errors_reported():
        write_shapes(parser.parse_args().folder, HardShapesConfig())
