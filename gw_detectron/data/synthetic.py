"""A synthetic COCO data set for detection and instance segmentation, made from a seed on first use.

Six classes of textured shapes, overlapping, cut by the image border and of very different sizes, lie on
cluttered backgrounds; the outline tells the class, the colour hints at it. Masks describe what is visible;
some groups of small shapes are crowd regions. On disk it looks as COCO does:

    <root>/gw_synthetic/annotations/instances_train.json   and instances_val.json; `info` says how it was made
    <root>/gw_synthetic/train/000001.jpg ...               and val/...

`register_synthetic` makes it known to Detectron2 as `gw_synthetic_train` and `gw_synthetic_val`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import portalocker
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets.coco import load_coco_json
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, file_lock
from PIL import Image
from tqdm import tqdm

from .outlines import annotate
from .rendering import SHAPES, Scene

CLASS_NAMES: tuple[str, ...] = tuple(shape.name for shape in SHAPES)
SPLITS: tuple[str, ...] = ("train", "val")

_FOLDER = "gw_synthetic"
# Raise this whenever the same parameters would give other pictures or annotations than before.
_FORMAT = 1


@dataclass(frozen=True)
class SyntheticConfig:
    """What the data set is made from; equal parameters give equal files (with equal NumPy and Pillow).

    Args:
        num_train: images in the training split.
        num_val: images in the validation split.
        seed: start of all random numbers; each image has its own stream, so more images keep the others.
        min_side: smallest height or width of an image, in pixels.
        max_side: largest height or width of an image, in pixels; the two are drawn independently.
        min_objects: fewest objects in an image.
        max_objects: most objects in an image; a full image may get fewer, never fewer than `min_objects`.
        min_size: smallest object, as a fraction of the image's shorter side; large sizes are more frequent.
        max_size: largest object, as a fraction of the image's shorter side.
        min_visible: smallest part of an object's area that stays visible, in (0, 1].
        hue_spread: range of an object's hue about its class's own, in [0, 1] of the colour circle; at 1 the
            colour says nothing of the class.
        crowd_fraction: part of the images that has a crowd region, in [0, 1].
        jpeg_quality: 1 to 95.

    Raises:
        ValueError: a parameter is outside what is allowed.
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
        rules = {
            "num_train": (self.num_train >= 1, ">= 1"),
            "num_val": (self.num_val >= 1, ">= 1"),
            "seed": (self.seed >= 0, ">= 0"),
            "min_side": (self.min_side >= 48, ">= 48 pixels"),
            "max_side": (self.max_side >= self.min_side, f">= min_side={self.min_side}"),
            "min_objects": (self.min_objects >= 1, ">= 1"),
            "max_objects": (self.max_objects >= self.min_objects, f">= min_objects={self.min_objects}"),
            "min_size": (0 < self.min_size <= 1, "in (0, 1]"),
            "max_size": (self.min_size <= self.max_size <= 1, f"in [min_size={self.min_size}, 1]"),
            "min_visible": (0 < self.min_visible <= 1, "in (0, 1]"),
            "hue_spread": (0 <= self.hue_spread <= 1, "in [0, 1]"),
            "crowd_fraction": (0 <= self.crowd_fraction <= 1, "in [0, 1]"),
            "jpeg_quality": (1 <= self.jpeg_quality <= 95, "in 1 ... 95"),
        }
        for name, (fine, allowed) in rules.items():
            if not fine:
                raise ValueError(f"SyntheticConfig: {name}={getattr(self, name)} must be {allowed}.")

    def count(self, split: str) -> int:
        """Return the number of images in a split, "train" or "val"."""
        return {"train": self.num_train, "val": self.num_val}[split]


def draw_scene(config: SyntheticConfig, split: str, index: int) -> Scene:
    """Paint one image of the data set.

    Args:
        config: the data set's parameters.
        split: "train" or "val".
        index: 0 ... count - 1 in that split.

    Raises:
        ValueError: `min_objects` do not fit into the image.
    """
    rng = np.random.default_rng([config.seed, SPLITS.index(split), index])
    height, width = (int(side) for side in rng.integers(config.min_side, config.max_side + 1, 2))
    scene = Scene(height, width, rng, config.min_visible, config.hue_spread)
    if rng.uniform() < config.crowd_fraction:
        scene.add_crowd(int(rng.integers(len(SHAPES))))
    wanted = int(rng.integers(config.min_objects, config.max_objects + 1))
    placed = 0
    for attempt in range(50 * wanted):
        if placed == wanted or (placed >= config.min_objects and attempt >= 10 * wanted):
            break
        # sqrt makes large ones more frequent; on the logarithmic scale every size has its share.
        fraction = config.min_size * (config.max_size / config.min_size) ** np.sqrt(rng.uniform())
        size = max(8.0, fraction * min(height, width))
        placed += scene.add_object(int(rng.integers(len(SHAPES))), size)
    if placed < config.min_objects:
        raise ValueError(
            f"SyntheticConfig: only {placed} of min_objects={config.min_objects} fit into an image of "
            f"{width}x{height} pixels; ask for fewer or smaller objects, larger images, "
            "or a smaller min_visible."
        )
    return scene


def make_synthetic(root: str | os.PathLike[str], config: SyntheticConfig | None = None) -> Path:
    """Make the data set below a folder, or check and reuse the one that is there.

    Processes that start at once wait for the first one. The folder appears when it is complete, not before: a
    run that was killed leaves at most `gw_synthetic.partial`, which the next run removes.

    Args:
        root: the folder that holds data sets, as in `DETECTRON2_DATASETS`; created if needed.
        config: parameters; None means the defaults.

    Returns:
        The folder `<root>/gw_synthetic`.

    Raises:
        ValueError: the folder holds something else, a damaged set, or one made with other parameters.
        OSError: it cannot be written: disk full, no permission, ...
    """
    config = config or SyntheticConfig()
    folder = Path(root, _FOLDER)
    if not folder.exists():
        try:
            with file_lock(os.path.abspath(folder)):
                if not folder.exists():
                    _write(folder, config)
        except OSError as error:
            raise OSError(
                error.errno,
                f"Cannot write the synthetic data set to '{folder}' ({error.strerror or error}). "
                "Make room or get permission there, or set DETECTRON2_DATASETS to another folder.",
            ) from error
        except portalocker.LockException as error:
            raise RuntimeError(
                f"Cannot lock '{folder}.lock' ({error}): another process has been making the synthetic "
                "data set for an hour, or this file system has no locks. End that process, or set "
                "DETECTRON2_DATASETS to a folder on a local disk."
            ) from error
    for split in SPLITS:
        _check(folder, split, config)
    return folder


def _write(folder: Path, config: SyntheticConfig) -> None:
    """Draw and annotate all in a folder beside the final one, then rename it; the caller holds the lock."""
    partial = folder.with_name(_FOLDER + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "annotations").mkdir(parents=True)
        image_id = annotation_id = 0
        total = config.num_train + config.num_val
        with tqdm(total=total, desc=f"making {folder}", unit="image", mininterval=0.5) as progress:
            for split in SPLITS:
                (partial / split).mkdir()
                content = _empty_content(split, config)
                for index in range(config.count(split)):
                    scene = draw_scene(config, split, index)
                    image_id += 1
                    name = f"{image_id:06d}.jpg"
                    picture = io.BytesIO()
                    image = Image.fromarray(scene.image())
                    image.save(picture, "JPEG", quality=config.jpeg_quality)
                    # Not written by Pillow, whose errors do not say that the disk is full.
                    (partial / split / name).write_bytes(picture.getvalue())
                    size = {"height": image.height, "width": image.width}
                    content["images"].append({"id": image_id, "file_name": name, **size})
                    for layer in scene.layers:
                        annotation_id += 1
                        content["annotations"].append(annotate(layer, image_id, annotation_id))
                    progress.update()
                _json_file(partial, split).write_text(json.dumps(content, separators=(",", ":")))
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _empty_content(split: str, config: SyntheticConfig) -> dict[str, Any]:
    return {
        "info": {"description": f"gw_detectron synthetic shapes, {split}", _FOLDER: _made_with(config)},
        "licenses": [],
        "images": [],
        "annotations": [],
        "categories": [{"id": i, "name": name} for i, name in enumerate(CLASS_NAMES, start=1)],
    }


def _made_with(config: SyntheticConfig) -> dict[str, Any]:
    return {"format": _FORMAT, **dataclasses.asdict(config)}


def _json_file(folder: Path, split: str) -> Path:
    return folder / "annotations" / f"instances_{split}.json"


def _check(folder: Path, split: str, config: SyntheticConfig) -> None:
    """Raise a ValueError unless a split is complete and was made with these parameters."""
    path = _json_file(folder, split)
    # Not made again unasked: another run may be reading these files, and would not notice the exchange.
    remedy = f"Delete '{folder}' to have it made again, or set DETECTRON2_DATASETS to another folder."
    try:
        content = json.loads(path.read_bytes())
        made_with, images = content["info"][_FOLDER], content["images"]
    except FileNotFoundError:
        raise ValueError(f"'{folder}' is not a complete synthetic data set: '{path}' is missing. {remedy}") from None
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged, not valid json ({error}). {remedy}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"'{path}' lacks what the synthetic data set must have: {error}. {remedy}") from error
    expected = _made_with(config)
    differing = [key for key in {**expected, **made_with} if made_with.get(key) != expected.get(key)]
    if differing:
        listed = ", ".join(f"{key}={made_with.get(key)} (now {expected.get(key)})" for key in differing)
        raise ValueError(f"The synthetic data set in '{folder}' was made with {listed}. {remedy}")
    present = set(os.listdir(folder / split)) if (folder / split).is_dir() else set()
    missing = [image["file_name"] for image in images if image["file_name"] not in present]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(images)} images are missing in '{folder / split}', "
            f"the first is {missing[0]}. {remedy}"
        )


class _MadeOnFirstUse(PathHandler):
    """Makes the data set when Detectron2 first opens a json file of it, in the loader or in the evaluator."""

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
    """Register `gw_synthetic_train` and `gw_synthetic_val`; the files are made when first asked for.

    May be called again: the last root and parameters count.

    Args:
        root: folder that holds data sets; None means the variable DETECTRON2_DATASETS, else "datasets".
        config: parameters; None means the defaults.
    """
    if root is None:
        root = os.getenv("DETECTRON2_DATASETS", "datasets")
    root = os.path.expanduser(os.fspath(root))
    PathManager.register_handler(_MadeOnFirstUse(root, config or SyntheticConfig()), allow_override=True)
    for split in SPLITS:
        name = f"gw_synthetic_{split}"
        json_file = str(_json_file(Path(root, _FOLDER), split))
        image_root = os.path.join(root, _FOLDER, split)
        if MetadataCatalog.get(name).get("json_file") == json_file:
            continue
        # Metadata refuses to change, so that of another root must go first.
        DatasetCatalog.pop(name, None)
        MetadataCatalog.pop(name)
        DatasetCatalog.register(name, functools.partial(load_coco_json, json_file, image_root, name))
        MetadataCatalog.get(name).set(
            json_file=json_file,
            image_root=image_root,
            evaluator_type="coco",
            thing_classes=list(CLASS_NAMES),
            thing_dataset_id_to_contiguous_id={i + 1: i for i in range(len(CLASS_NAMES))},
        )
