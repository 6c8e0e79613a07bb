"""Parameters of the synthetic datasets."""

import math
from dataclasses import dataclass
from typing import ClassVar

from ...errors import ConfigError
from .hard_scene import HardScene
from .rendering import Scene
from .shapes import SHAPES


@dataclass(frozen=True)
class SyntheticConfig:
    """Parameters of the synthetic dataset.

    Equal parameters give equal files, with equal versions of NumPy and Pillow.

    Args:
        num_train: images in the training split.
        num_val: images in the validation split.
        seed: random seed. Each image has its own stream: a larger split begins with the same images.
        min_side: smallest height or width of an image, in pixels.
        max_side: largest height or width of an image, in pixels. The two are drawn independently.
        min_objects: fewest objects in an image.
        max_objects: most objects in an image. A full image can get fewer, never fewer than `min_objects`.
        min_size: smallest object, as a fraction of the image's shorter side.
        max_size: largest object, as a fraction of the image's shorter side.
        min_visible: smallest visible fraction of an object's area, in (0, 1].
        hue_spread: range of an object's hue around the hue of its class, in [0, 1] of the color circle. With 1 the
            color does not depend on the class.
        crowd_fraction: fraction of the images with a crowd region, in [0, 1].
        jpeg_quality: 1 to 95.

    Raises:
        ConfigError: a parameter is out of range.
    """

    num_train: int = 800
    num_val: int = 100
    seed: int = 0
    min_side: int = 112
    max_side: int = 176
    min_objects: int = 1
    max_objects: int = 5
    min_size: float = 0.15
    max_size: float = 0.85
    min_visible: float = 0.65
    hue_spread: float = 0.2
    crowd_fraction: float = 0.08
    jpeg_quality: int = 92

    #: folder of the files, and prefix of the registered names
    folder: ClassVar[str] = "gw_synthetic"
    #: the place of a split selects its random streams, so a new one comes last
    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    scene: ClassVar[type[Scene]] = Scene
    class_names: ClassVar[tuple[str, ...]] = tuple(shape.name for shape in SHAPES)
    #: of u in size = min_size (max_size / min_size)^(u^exponent), u uniform: below 1 large sizes are more frequent
    size_exponent: ClassVar[float] = 0.5

    def __post_init__(self) -> None:
        above_zero = math.ulp(0.0)
        ranges = dict.fromkeys((*(f"num_{split}" for split in self.splits), "min_objects"), (1, math.inf))
        ranges |= {"seed": (0, math.inf), "min_side": (48, math.inf), "jpeg_quality": (1, 95)}
        ranges |= {"max_side": (self.min_side, math.inf), "max_objects": (self.min_objects, math.inf)}
        fractions = {"min_size": (above_zero, 1), "max_size": (self.min_size, 1), "min_visible": (above_zero, 1)}
        fractions |= dict.fromkeys(("hue_spread", "crowd_fraction"), (0, 1))
        for name, (low, high) in (ranges | fractions).items():
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses nan
                allowed = f"more than 0 and at most {high}" if low == above_zero else f"{low} to {high}"
                raise ConfigError(f"{type(self).__name__}: {name} ({value}): out of range. Fix: give {allowed}.")

    def count(self, split: str) -> int:
        """Return the number of images in one of `splits`."""
        return getattr(self, f"num_{split}")


@dataclass(frozen=True)
class HardSyntheticConfig(SyntheticConfig):
    """Parameters of the hard synthetic dataset.

    Classes are pairs of shape and texture, see :class:`.hard_scene.HardScene`. Learning rates and the like are chosen
    on the split "tune", so that "val" is only scored.

    Args:
        num_tune: images in the split "tune".
        others: see :class:`SyntheticConfig`.
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

    folder: ClassVar[str] = "gw_synthetic_hard"
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "tune")
    scene: ClassVar[type[Scene]] = HardScene
    class_names: ClassVar[tuple[str, ...]] = tuple(shape.name for shape in HardScene.shapes[: HardScene.num_classes])
    size_exponent: ClassVar[float] = 1.0
