"""A COCO dataset of shapes for detection and instance segmentation, drawn from a seed.

Textured shapes of very different sizes overlap each other and the image border, on cluttered
backgrounds. The outline tells the class, the color hints at it. Masks cover the visible part of an
object; some groups of small shapes are crowd regions. ``info`` of a json holds the parameters.
"""

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from gw_detectron.atomic import atomic_folder
from gw_detectron.errors import ConfigError
from gw_detectron.workbench.console import progress_bar

from .outlines import SHAPES
from .polygons import to_coco
from .scene import Scene

# Increase this whenever the same parameters would give other images or annotations than before.
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class ShapesConfig:
    """Parameters of the dataset; equal ones give equal files, with equal versions of NumPy and Pillow."""

    num_train: int = 800
    num_val: int = 100
    seed: int = (
        0  # each image has its own stream: a larger split begins with the same images
    )
    min_side: int = 112  # pixels; height and width are drawn independently
    max_side: int = 176
    min_objects: int = 1
    max_objects: int = 5  # a full image can get fewer, never fewer than min_objects
    min_size: float = 0.15  # of an object, as a fraction of the image's shorter side
    max_size: float = 0.85
    min_visible: float = 0.65  # fraction of an object's area, in (0, 1]
    # range of an object's hue around its class's; 1: the color tells nothing
    hue_spread: float = 0.2
    crowd_fraction: float = 0.08  # of the images
    jpeg_quality: int = 92

    name: ClassVar[str] = "gw_synthetic"
    # the place selects random streams: a new split comes last
    splits: ClassVar[tuple[str, ...]] = ("train", "val")
    scene: ClassVar[type[Scene]] = Scene
    class_names: ClassVar[tuple[str, ...]] = tuple(shape.name for shape in SHAPES)
    # size = min_size (max_size / min_size)^(u^exponent), u uniform: below 1 large sizes are more frequent
    size_exponent: ClassVar[float] = 0.5

    def count(self, split: str) -> int:
        """Return the number of images in one of ``splits``."""
        return getattr(self, f"num_{split}")


def draw_scene(config: ShapesConfig, split: str, index: int) -> Scene:
    """Draw image ``index`` of a split."""
    rng = np.random.default_rng([config.seed, config.splits.index(split), index])
    sides = rng.integers(config.min_side, config.max_side + 1, 2)
    height, width = sides.tolist()
    scene = config.scene(height, width, rng, config.min_visible, config.hue_spread)

    classes = len(config.class_names)
    if rng.uniform() < config.crowd_fraction:
        scene.add_crowd(rng.integers(classes).item())

    wanted = rng.integers(config.min_objects, config.max_objects + 1)
    growth = config.max_size / config.min_size
    placed = 0
    for attempt in range(50 * wanted):
        is_enough = placed >= config.min_objects and attempt >= 10 * wanted
        if is_enough or placed == wanted:
            break
        exponent = rng.uniform() ** config.size_exponent
        fraction = config.min_size * growth**exponent
        size = max(8.0, fraction * scene.short)
        placed += scene.add_object(rng.integers(classes).item(), size)

    if placed < config.min_objects:
        raise ConfigError(
            f"{type(config).__name__}: min_objects ({config.min_objects}): only {placed} fit into "
            f"an image of {width}x{height} pixels. Fix: use fewer or smaller objects, larger "
            "images, or a smaller min_visible."
        )
    return scene


def draw_images(count: int = 1, side: int = 224) -> list[Image.Image]:
    """Draw the same square images every time."""
    config = ShapesConfig(min_side=side, max_side=side, crowd_fraction=0.0)
    scenes = (draw_scene(config, "val", index) for index in range(count))
    return [Image.fromarray(scene.image()) for scene in scenes]


def write_shapes(folder: str | os.PathLike[str], config: ShapesConfig) -> None:
    """Write a dataset to a new folder, all or nothing.

    The files are ``annotations/instances_SPLIT.json`` and ``SPLIT/*.jpg``. A folder that holds
    files is a FileAccessError.
    """
    image_ids = itertools.count(1)
    annotation_ids = itertools.count(1)
    with atomic_folder(folder, ()) as new:
        (new / "annotations").mkdir()
        for split in config.splits:
            (new / split).mkdir()
            images: list[dict[str, Any]] = []
            annotations: list[dict[str, Any]] = []
            indices = range(config.count(split))
            for index in progress_bar(indices, desc=f"drawing {split}", unit="image"):
                scene = draw_scene(config, split, index)
                image = _write_photo(
                    scene, new / split, next(image_ids), config.jpeg_quality
                )
                images.append(image)
                for shown in scene.objects:
                    annotation = to_coco(shown, image["id"], next(annotation_ids))
                    annotations.append(annotation)

            content = _content(config, split, images, annotations)
            file = new / "annotations" / f"instances_{split}.json"
            file.write_text(json.dumps(content, separators=(",", ":")))


def _write_photo(
    scene: Scene, folder: Path, image_id: int, quality: int
) -> dict[str, Any]:
    """Write a scene as a JPEG file; return its entry in ``images``."""
    photo = Image.fromarray(scene.image())
    name = f"{image_id:06d}.jpg"
    photo.save(folder / name, quality=quality)
    return {
        "id": image_id,
        "file_name": name,
        "height": photo.height,
        "width": photo.width,
    }


def _content(
    config: ShapesConfig,
    split: str,
    images: list[dict[str, Any]],
    annotations: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the content of a COCO file."""
    info = {
        "description": f"gw_detectron synthetic shapes, {split}",
        config.name: {"format": _FORMAT, **dataclasses.asdict(config)},
    }
    categories = [
        {"id": number, "name": name}
        for number, name in enumerate(config.class_names, start=1)
    ]
    return {
        "info": info,
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": categories,
    }
