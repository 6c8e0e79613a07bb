"""Synthetic COCO datasets, generated from a seed on first use.

They are for detection, for instance and panoptic segmentation, and for keypoints. Textured shapes of very different
sizes overlap each other and the image border, on cluttered backgrounds. In `gw_synthetic` the outline tells the class
and the color hints at it; `gw_synthetic_hard` is described in :mod:`.hard_scene`. Masks cover the visible part of an
object, whose extreme points are its keypoints; in `gw_synthetic` some groups of small shapes are crowd regions. The
files follow COCO, here those of one split:

    <root>/gw_synthetic/annotations/instances_train.json   with keypoints; `info` holds the parameters
    <root>/gw_synthetic/annotations/panoptic_train.json
    <root>/gw_synthetic/train/000001.jpg ...
    <root>/gw_synthetic/panoptic_train/000001.png ...          segment ids
    <root>/gw_synthetic/panoptic_stuff_train/000001.png ...    0 for things, 1 for the background
"""

import dataclasses
import io
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from iopath.common.file_io import file_lock
from PIL import Image
from tqdm import tqdm

from ...errors import ConfigError, DataError, FileAccessError
from ...progress import progress_bar
from .annotations import to_coco
from .panoptic import SEMANTIC_CLASSES, to_panoptic
from .rendering import Scene
from .shapes import Array
from .synthetic_config import SyntheticConfig

# Increase this whenever the same parameters would give other images or annotations than before.
_FORMAT = 2


def draw_scene(config: SyntheticConfig, split: str, index: int) -> Scene:
    """Render one image of the dataset.

    Args:
        config: the dataset's parameters.
        split: one of `config.splits`.
        index: 0 ... count - 1 in that split.

    Raises:
        ConfigError: fewer than `min_objects` fit into the image.
    """
    rng = np.random.default_rng([config.seed, config.splits.index(split), index])
    height, width = (int(side) for side in rng.integers(config.min_side, config.max_side + 1, 2))
    scene = config.scene(height, width, rng, config.min_visible, config.hue_spread)
    if rng.uniform() < config.crowd_fraction:
        scene.add_crowd(int(rng.integers(len(config.class_names))))
    target = int(rng.integers(config.min_objects, config.max_objects + 1))
    placed = 0
    for attempt in range(50 * target):
        if placed == target or (placed >= config.min_objects and attempt >= 10 * target):
            break
        fraction = config.min_size * (config.max_size / config.min_size) ** (rng.uniform() ** config.size_exponent)
        size = max(8.0, fraction * min(height, width))
        placed += scene.add_object(int(rng.integers(len(config.class_names))), size)
    if placed < config.min_objects:
        raise ConfigError(
            f"{type(config).__name__}: min_objects ({config.min_objects}): only {placed} fit into an image of "
            f"{width}x{height} pixels. Fix: use fewer or smaller objects, larger images, or a smaller min_visible."
        )
    return scene


def make_synthetic(root: str | os.PathLike[str], config: SyntheticConfig | None = None) -> Path:
    """Generate the dataset below a folder, or reuse the existing one.

    An existing one is checked. Concurrent processes wait for the first one. The final folder appears only when it is
    complete; a killed run leaves at most `<folder>.partial`, which the next run removes.

    Args:
        root: the folder of datasets, as in `DETECTRON2_DATASETS`; created if needed.
        config: parameters; None means `SyntheticConfig()`.

    Returns:
        The folder `<root>/gw_synthetic`, or that of the other dataset.

    Raises:
        DataError: the folder holds something else, a damaged set, or a set with other parameters.
        FileAccessError: the folder cannot be written (disk full, no permission, ...) or locked.
    """
    config = config or SyntheticConfig()
    folder = Path(root, config.folder)
    if not folder.exists():
        try:
            with file_lock(os.path.abspath(folder)):
                if not folder.exists():
                    _generate(folder, config)
        except OSError as error:
            failure = FileAccessError(
                f"'{folder}': cannot write the synthetic dataset: {error.strerror or error}. "
                "Fix: free disk space, get write permission, or set DETECTRON2_DATASETS to another folder."
            )
            failure.errno = error.errno
            raise failure from error
        except Exception as error:
            if "LockException" not in {kind.__name__ for kind in type(error).__mro__}:  # portalocker, below iopath
                raise
            raise FileAccessError(
                f"'{folder}.lock': cannot lock: {error}. Another process has held the lock for an hour, or this file "
                "system has no locks. Fix: end that process, or set DETECTRON2_DATASETS to a folder on a local disk."
            ) from error
    for split in config.splits:
        _check(folder, split, config)
    return folder


def _generate(folder: Path, config: SyntheticConfig) -> None:
    """Generate all files in a partial folder, then rename it. The caller holds the lock."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "annotations").mkdir(parents=True)
        ids = itertools.count(1), itertools.count(1)
        total = sum(map(config.count, config.splits))
        with progress_bar(desc=f"making {folder}", unit="image", total=total) as progress:
            for split in config.splits:
                _generate_split(partial, split, config, *ids, progress)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _generate_split(
    folder: Path,
    split: str,
    config: SyntheticConfig,
    image_ids: Iterator[int],
    annotation_ids: Iterator[int],
    progress: tqdm,
) -> None:
    folders = image_folders(folder, split)
    for path, _ in folders:
        path.mkdir()
    background_id = len(config.class_names) + 1
    images, objects, panoptic = [], [], []
    for index in range(config.count(split)):
        scene = draw_scene(config, split, index)
        pixels, labels = scene.image(), to_panoptic(scene.objects, background_id)
        image_id = next(image_ids)
        name = f"{image_id:06d}"
        for (path, ending), array in zip(folders, (pixels, labels.image, labels.semantic), strict=True):
            _write_image(path / f"{name}.{ending}", array, config.jpeg_quality)
        height, width = pixels.shape[:2]
        images.append({"id": image_id, "file_name": f"{name}.jpg", "height": height, "width": width})
        objects += [to_coco(obj, image_id, next(annotation_ids)) for obj in scene.objects]
        panoptic.append({"image_id": image_id, "file_name": f"{name}.png", "segments_info": labels.segments})
        progress.update()
    things = [{"id": i, "name": name} for i, name in enumerate(config.class_names, start=1)]
    stuff = {"id": background_id, "name": SEMANTIC_CLASSES[1], "isthing": 0}
    both = [*({**thing, "isthing": 1} for thing in things), stuff]
    for task, annotations, categories in (("instances", objects, things), ("panoptic", panoptic, both)):
        content = {
            "info": {"description": f"gw_detectron synthetic shapes, {split}", config.folder: _parameters(config)},
            "licenses": [],
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        json_file(folder, split, task).write_text(json.dumps(content, separators=(",", ":")))


def _parameters(config: SyntheticConfig) -> dict[str, Any]:
    return {"format": _FORMAT, **dataclasses.asdict(config)}


def json_file(folder: Path, split: str, task: str = "instances") -> Path:
    """Return the annotation file of a split."""
    return folder / "annotations" / f"{task}_{split}.json"


def image_folders(folder: Path, split: str) -> list[tuple[Path, str]]:
    """Return the folders of images, segment ids and semantic masks of a split, and the endings of their files."""
    return [
        (folder / split, "jpg"),
        (folder / f"panoptic_{split}", "png"),
        (folder / f"panoptic_stuff_{split}", "png"),
    ]


def _write_image(path: Path, pixels: Array, jpeg_quality: int) -> None:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, {".jpg": "JPEG", ".png": "PNG"}[path.suffix], quality=jpeg_quality)
    path.write_bytes(content.getvalue())  # Pillow's own file errors do not tell that the disk is full


def _check(folder: Path, split: str, config: SyntheticConfig) -> None:
    """Raise unless a split is complete and has these parameters.

    A bad set is not generated again by itself: another run may be reading its files.
    """
    path = json_file(folder, split)
    fix = f"Fix: delete '{folder}' to generate it again, or set DETECTRON2_DATASETS to another folder."
    try:
        content = json.loads(path.read_bytes())
        found, images = content["info"][config.folder], content["images"]
    except FileNotFoundError:
        raise DataError(f"'{path}': file of the synthetic dataset not found. {fix}") from None
    except ValueError as error:
        raise DataError(f"'{path}': damaged, not valid JSON: {error}. {fix}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"'{path}': not of the synthetic dataset, missing key: {error}. {fix}") from error
    expected = _parameters(config)
    different = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    if different:
        listed = ", ".join(f"{key}={found.get(key)} (now {expected.get(key)})" for key in different)
        raise DataError(f"'{folder}': the synthetic dataset has other parameters: {listed}. {fix}")
    for images_at, ending in image_folders(folder, split):
        present = set(os.listdir(images_at)) if images_at.is_dir() else set()
        names = [f"{Path(image['file_name']).stem}.{ending}" for image in images]
        if missing := [name for name in names if name not in present]:
            raise DataError(
                f"'{images_at}': {len(missing)} of {len(names)} images are missing, first {missing[0]}. {fix}"
            )
