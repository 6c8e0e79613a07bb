"""Synthetic COCO dataset for detection and instance segmentation, generated from a seed on first use.

Textured shapes of very different sizes overlap each other and the image border, on cluttered backgrounds. The outline
tells the class, the color hints at it. Masks cover the visible part of an object; some groups of small shapes are crowd
regions. Files are laid out as in COCO; ``info`` of a json holds the parameters.
"""

import dataclasses
import functools
import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, file_lock
from PIL import Image

from ...atomic import atomic_folder
from ...errors import ConfigError, DataError
from ..console import progress_bar
from .polygons import to_coco
from .scene import SHAPES, Scene

# Increase this whenever the same parameters would give other images or annotations than before.
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """Parameters of the synthetic dataset; equal ones give equal files, with equal versions of NumPy and Pillow."""

    num_train: int = 800
    num_val: int = 100
    seed: int = 0  # each image has its own stream: a larger split begins with the same images
    min_side: int = 112  # pixels; height and width are drawn independently
    max_side: int = 176
    min_objects: int = 1
    max_objects: int = 5  # a full image can get fewer, never fewer than min_objects
    min_size: float = 0.15  # of an object, as a fraction of the image's shorter side
    max_size: float = 0.85
    min_visible: float = 0.65  # fraction of an object's area, in (0, 1]
    hue_spread: float = (
        0.2  # range of an object's hue around its class's; 1: the color tells nothing
    )
    crowd_fraction: float = 0.08  # of the images
    jpeg_quality: int = 92

    folder: ClassVar[str] = "gw_synthetic"  # of the files, and prefix of the registered names
    splits: ClassVar[tuple[str, ...]] = (
        "train",
        "val",
    )  # the place selects random streams: a new split comes last
    scene: ClassVar[type[Scene]] = Scene
    class_names: ClassVar[tuple[str, ...]] = tuple(shape.name for shape in SHAPES)
    # size = min_size (max_size / min_size)^(u^exponent), u uniform: below 1 large sizes are more frequent
    size_exponent: ClassVar[float] = 0.5

    def count(self, split: str) -> int:
        """Return the number of images in one of ``splits``."""
        return getattr(self, f"num_{split}")


def draw_scene(config: SyntheticConfig, split: str, index: int) -> Scene:
    """Render image ``index`` of a split."""
    rng = np.random.default_rng([config.seed, config.splits.index(split), index])
    height, width = (
        int(side) for side in rng.integers(config.min_side, config.max_side + 1, 2)
    )
    scene = config.scene(height, width, rng, config.min_visible, config.hue_spread)
    if rng.uniform() < config.crowd_fraction:
        scene.add_crowd(int(rng.integers(len(config.class_names))))
    target = int(rng.integers(config.min_objects, config.max_objects + 1))
    placed = 0
    for attempt in range(50 * target):
        if placed == target or (placed >= config.min_objects and attempt >= 10 * target):
            break
        fraction = config.min_size * (config.max_size / config.min_size) ** (
            rng.uniform() ** config.size_exponent
        )
        size = max(8.0, fraction * min(height, width))
        placed += scene.add_object(int(rng.integers(len(config.class_names))), size)
    if placed < config.min_objects:
        raise ConfigError(
            f"{type(config).__name__}: min_objects ({config.min_objects}): only {placed} fit into an image of "
            f"{width}x{height} pixels. Fix: use fewer or smaller objects, larger images, or a smaller min_visible."
        )
    return scene


def synthetic_images(count: int = 4, side: int = 224) -> list[Image.Image]:
    """Draw the same square images every time."""
    config = SyntheticConfig(num_val=count, min_side=side, max_side=side, crowd_fraction=0.0)
    return [Image.fromarray(draw_scene(config, "val", index).image()) for index in range(count)]


def make_synthetic(root: str | os.PathLike[str], config: SyntheticConfig | None = None) -> Path:
    """Generate the dataset below a folder of datasets, or check an existing one; return its folder.

    Concurrent processes wait for the first one; the folder appears only when it is complete. A folder with something
    else, a damaged set, or a set with other parameters is a DataError.
    """
    config = config or SyntheticConfig()
    folder = Path(root, config.folder)
    if not folder.exists():
        with file_lock(os.path.abspath(folder)):
            if not folder.exists():
                with atomic_folder(folder, ()) as new:
                    _generate(new, config, f"making {folder}")
    for split in config.splits:
        _check(folder, split, config)
    return folder


def _generate(folder: Path, config: SyntheticConfig, title: str) -> None:
    image_ids, annotation_ids = itertools.count(1), itertools.count(1)
    (folder / "annotations").mkdir()
    with progress_bar(
        desc=title, unit="image", total=sum(map(config.count, config.splits))
    ) as progress:
        for split in config.splits:
            (folder / split).mkdir()
            images: list[dict[str, Any]] = []
            annotations: list[dict[str, Any]] = []
            for index in range(config.count(split)):
                scene = draw_scene(config, split, index)
                pixels, image_id = scene.image(), next(image_ids)
                height, width = pixels.shape[:2]
                name = f"{image_id:06d}.jpg"
                jpeg = (
                    io.BytesIO()
                )  # Pillow's own file errors do not tell that the disk is full
                Image.fromarray(pixels).save(jpeg, "JPEG", quality=config.jpeg_quality)
                (folder / split / name).write_bytes(jpeg.getvalue())
                images.append(
                    {"id": image_id, "file_name": name, "height": height, "width": width}
                )
                annotations += [
                    to_coco(obj, image_id, next(annotation_ids)) for obj in scene.objects
                ]
                progress.update()
            content = {
                "info": {
                    "description": f"gw_detectron synthetic shapes, {split}",
                    config.folder: _parameters(config),
                },
                "licenses": [],
                "images": images,
                "annotations": annotations,
                "categories": [
                    {"id": i, "name": name}
                    for i, name in enumerate(config.class_names, start=1)
                ],
            }
            _json_file(folder, split).write_text(json.dumps(content, separators=(",", ":")))


def _parameters(config: SyntheticConfig) -> dict[str, Any]:
    return {"format": _FORMAT, **dataclasses.asdict(config)}


def _json_file(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"instances_{split}.json"


def _check(folder: Path, split: str, config: SyntheticConfig) -> None:
    """Raise unless a split has these parameters; it is not generated again, as another run may be reading it."""
    path = _json_file(folder, split)
    fix = f"Fix: delete '{folder}' to generate it again, or set DETECTRON2_DATASETS to another folder."
    try:
        found = json.loads(path.read_bytes())["info"][config.folder]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"'{path}': not a file of the synthetic dataset, or damaged: {error!r}. {fix}"
        ) from error
    expected = _parameters(config)
    if different := [
        key for key in {**expected, **found} if found.get(key) != expected.get(key)
    ]:
        listed = ", ".join(
            f"{key}={found.get(key)} (now {expected.get(key)})" for key in different
        )
        raise DataError(
            f"'{folder}': the synthetic dataset has other parameters: {listed}. {fix}"
        )


class GeneratedFiles(PathHandler):
    """Path handler of files that ``make`` writes when one of them is first used.

    Not a ``NativePathHandler``: iopath would then use it for all local files.
    """

    def __init__(self, paths: list[str], make: Callable[[], Any]) -> None:
        super().__init__()
        self._paths, self._make = paths, make

    def _get_supported_prefixes(self) -> list[str]:
        return self._paths

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        self._make()
        return path

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        return open(self._get_local_path(path), mode, buffering, **kwargs)


def register_synthetic(
    root: str | os.PathLike[str] | None = None, config: SyntheticConfig | None = None
) -> None:
    """Register ``gw_synthetic_train`` and ``gw_synthetic_val``; the files are generated on first use.

    A second call replaces the root (default: the variable DETECTRON2_DATASETS, else "datasets") and the parameters.
    """
    config = config or SyntheticConfig()
    root = os.path.expanduser(
        os.getenv("DETECTRON2_DATASETS", "datasets") if root is None else root
    )
    folder, class_ids = (
        Path(root, config.folder),
        {i + 1: i for i in range(len(config.class_names))},
    )
    files = [str(_json_file(folder, split)) for split in config.splits]
    handler = GeneratedFiles(files, functools.partial(make_synthetic, root, config))
    PathManager.register_handler(handler, allow_override=True)
    metadata = {
        "thing_classes": list(config.class_names),
        "thing_dataset_id_to_contiguous_id": class_ids,
    }
    for split, file in zip(config.splits, files, strict=True):
        name = f"{config.folder}_{split}"
        # Metadata cannot be changed: remove the entries of another root first.
        DatasetCatalog.pop(name, None)
        MetadataCatalog.pop(name, None)
        register_coco_instances(name, metadata, file, str(folder / split))
