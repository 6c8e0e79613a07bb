"""Synthetic COCO dataset, generated from a seed on first use.

It is for detection and instance segmentation. Six classes of textured shapes of very different sizes overlap each other
and the image border, on cluttered backgrounds. The outline tells the class, the color hints at it. Masks cover the
visible part of an object; some groups of small shapes are crowd regions. The files follow COCO:

    <root>/gw_synthetic/annotations/instances_train.json   and instances_val.json; `info` holds the parameters
    <root>/gw_synthetic/train/000001.jpg ...               and val/...

`register_synthetic` registers it with Detectron2 as `gw_synthetic_train` and `gw_synthetic_val`.
"""

import dataclasses
import io
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, file_lock
from PIL import Image
from tqdm import tqdm

from ..errors import ConfigError, DataError, FileAccessError
from .annotations import to_coco
from .rendering import SHAPES, Scene

CLASS_NAMES: tuple[str, ...] = tuple(shape.name for shape in SHAPES)
SPLITS: tuple[str, ...] = ("train", "val")

_FOLDER = "gw_synthetic"
# Increase this whenever the same parameters would give other images or annotations than before.
_FORMAT = 1


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
        min_size: smallest object, as a fraction of the image's shorter side. Large sizes are more frequent.
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

    def __post_init__(self) -> None:
        above_zero = math.ulp(0.0)
        ranges = dict.fromkeys(("num_train", "num_val", "min_objects"), (1, math.inf))
        ranges |= {"seed": (0, math.inf), "min_side": (48, math.inf), "jpeg_quality": (1, 95)}
        ranges |= {"max_side": (self.min_side, math.inf), "max_objects": (self.min_objects, math.inf)}
        fractions = {"min_size": (above_zero, 1), "max_size": (self.min_size, 1), "min_visible": (above_zero, 1)}
        fractions |= dict.fromkeys(("hue_spread", "crowd_fraction"), (0, 1))
        for name, (low, high) in (ranges | fractions).items():
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses nan
                allowed = f"more than 0 and at most {high}" if low == above_zero else f"{low} to {high}"
                raise ConfigError(f"SyntheticConfig: {name} ({value}): out of range. Fix: give {allowed}.")

    def count(self, split: str) -> int:
        """Return the number of images in a split, "train" or "val"."""
        return {"train": self.num_train, "val": self.num_val}[split]


def draw_scene(config: SyntheticConfig, split: str, index: int) -> Scene:
    """Render one image of the dataset.

    Args:
        config: the dataset's parameters.
        split: "train" or "val".
        index: 0 ... count - 1 in that split.

    Raises:
        ConfigError: fewer than `min_objects` fit into the image.
    """
    rng = np.random.default_rng([config.seed, SPLITS.index(split), index])
    height, width = (int(side) for side in rng.integers(config.min_side, config.max_side + 1, 2))
    scene = Scene(height, width, rng, config.min_visible, config.hue_spread)
    if rng.uniform() < config.crowd_fraction:
        scene.add_crowd(int(rng.integers(len(SHAPES))))
    target = int(rng.integers(config.min_objects, config.max_objects + 1))
    placed = 0
    for attempt in range(50 * target):
        if placed == target or (placed >= config.min_objects and attempt >= 10 * target):
            break
        # Log-uniform sizes would favor small objects; the square root makes large ones more frequent.
        fraction = config.min_size * (config.max_size / config.min_size) ** np.sqrt(rng.uniform())
        size = max(8.0, fraction * min(height, width))
        placed += scene.add_object(int(rng.integers(len(SHAPES))), size)
    if placed < config.min_objects:
        raise ConfigError(
            f"SyntheticConfig: min_objects ({config.min_objects}): only {placed} fit into an image of {width}x{height} "
            "pixels. Fix: use fewer or smaller objects, larger images, or a smaller min_visible."
        )
    return scene


def make_synthetic(root: str | os.PathLike[str], config: SyntheticConfig | None = None) -> Path:
    """Generate the dataset below a folder, or reuse the existing one.

    An existing one is checked. Concurrent processes wait for the first one. The final folder appears only when it is
    complete; a killed run leaves at most `gw_synthetic.partial`, which the next run removes.

    Args:
        root: the folder of datasets, as in `DETECTRON2_DATASETS`; created if needed.
        config: parameters; None means the defaults.

    Returns:
        The folder `<root>/gw_synthetic`.

    Raises:
        DataError: the folder holds something else, a damaged set, or a set with other parameters.
        FileAccessError: the folder cannot be written (disk full, no permission, ...) or locked.
    """
    config = config or SyntheticConfig()
    folder = Path(root, _FOLDER)
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
    for split in SPLITS:
        _check(folder, split, config)
    return folder


def _generate(folder: Path, config: SyntheticConfig) -> None:
    """Generate all files in a partial folder, then rename it. The caller holds the lock."""
    partial = folder.with_name(_FOLDER + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "annotations").mkdir(parents=True)
        image_id = annotation_id = 0
        total = config.num_train + config.num_val
        with tqdm(total=total, desc=f"making {folder}", unit="image", mininterval=0.5) as progress:
            for split in SPLITS:
                (partial / split).mkdir()
                images: list[dict[str, Any]] = []
                annotations: list[dict[str, Any]] = []
                for index in range(config.count(split)):
                    scene = draw_scene(config, split, index)
                    image_id += 1
                    name = f"{image_id:06d}.jpg"
                    image = Image.fromarray(scene.image())
                    jpeg = io.BytesIO()
                    image.save(jpeg, "JPEG", quality=config.jpeg_quality)
                    # Pillow's own file errors do not tell that the disk is full.
                    (partial / split / name).write_bytes(jpeg.getvalue())
                    images.append({"id": image_id, "file_name": name, "height": image.height, "width": image.width})
                    for obj in scene.objects:
                        annotation_id += 1
                        annotations.append(to_coco(obj, image_id, annotation_id))
                    progress.update()
                content = {
                    "info": {"description": f"gw_detectron synthetic shapes, {split}", _FOLDER: _parameters(config)},
                    "licenses": [],
                    "images": images,
                    "annotations": annotations,
                    "categories": [{"id": i, "name": name} for i, name in enumerate(CLASS_NAMES, start=1)],
                }
                _json_file(partial, split).write_text(json.dumps(content, separators=(",", ":")))
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _parameters(config: SyntheticConfig) -> dict[str, Any]:
    return {"format": _FORMAT, **dataclasses.asdict(config)}


def _json_file(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"instances_{split}.json"


def _check(folder: Path, split: str, config: SyntheticConfig) -> None:
    """Raise unless a split is complete and has these parameters.

    A bad set is not generated again by itself: another run may be reading its files.
    """
    path = _json_file(folder, split)
    fix = f"Fix: delete '{folder}' to generate it again, or set DETECTRON2_DATASETS to another folder."
    try:
        content = json.loads(path.read_bytes())
        found, images = content["info"][_FOLDER], content["images"]
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
    present = set(os.listdir(folder / split)) if (folder / split).is_dir() else set()
    missing = [image["file_name"] for image in images if image["file_name"] not in present]
    if missing:
        raise DataError(
            f"'{folder / split}': {len(missing)} of {len(images)} images are missing, first {missing[0]}. {fix}"
        )


class _SyntheticPathHandler(PathHandler):
    """Generate the dataset when one of its JSON files is opened.

    Detectron2 opens it in the loader or the evaluator. Not a ``NativePathHandler``: iopath would then use it for all
    local files.
    """

    def __init__(self, root: str, config: SyntheticConfig) -> None:
        super().__init__()
        self.root, self.config = root, config

    def _get_supported_prefixes(self) -> list[str]:
        return [str(_json_file(Path(self.root, _FOLDER), split)) for split in SPLITS]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        make_synthetic(self.root, self.config)
        return path

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        return open(self._get_local_path(path), mode, buffering, **kwargs)

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return os.path.exists(path)

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return os.path.isfile(path)


def register_synthetic(root: str | os.PathLike[str] | None = None, config: SyntheticConfig | None = None) -> None:
    """Register `gw_synthetic_train` and `gw_synthetic_val`; the files are generated on first use.

    A second call replaces the root and the parameters of the first.

    Args:
        root: folder of datasets; None means the variable DETECTRON2_DATASETS, else "datasets".
        config: parameters; None means the defaults.
    """
    if root is None:
        root = os.getenv("DETECTRON2_DATASETS", "datasets")
    root = os.path.expanduser(os.fspath(root))
    PathManager.register_handler(_SyntheticPathHandler(root, config or SyntheticConfig()), allow_override=True)
    for split in SPLITS:
        name = f"gw_synthetic_{split}"
        json_file = str(_json_file(Path(root, _FOLDER), split))
        image_root = os.path.join(root, _FOLDER, split)
        if MetadataCatalog.get(name).get("json_file") == json_file:
            continue
        # Metadata cannot be changed: remove the entry of another root first.
        DatasetCatalog.pop(name, None)
        MetadataCatalog.pop(name)
        class_ids = {i + 1: i for i in range(len(CLASS_NAMES))}
        metadata = {"thing_classes": list(CLASS_NAMES), "thing_dataset_id_to_contiguous_id": class_ids}
        register_coco_instances(name, metadata, json_file, image_root)
