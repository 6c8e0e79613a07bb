"""Derive config keys from COCO files (``--auto``), each with its reason."""

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torchvision
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from torch.torch_version import TorchVersion

from ...config import anchor_strides, get_value, training_sides
from ...errors import ConfigError, DataError
from ...modeling.build import object_count_keys
from ..images import evenly_spread, is_deep
from .coco_files import complete_coco, read_json
from .fingerprint import Fingerprint, anchor_fit, anchor_shapes, read_fingerprint

log = logging.getLogger(__name__)

_RATIOS = ([0.5, 1.0, 2.0], [0.33, 0.57, 1.0, 1.75, 3.0], [0.12, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
_NOTABLE = 0.02  # a smaller gain of mean overlap changes no anchors
_RARE = 10  # a class is rare if another one is in so many times more images
_SCALES = (
    0.75,
    0.875,
    1.0,
    1.125,
    1.25,
)  # of images in training: their median is the scale of the evaluation


def auto_config(
    cfg: CfgNode,
    json: str | os.PathLike[str],
    images: str | os.PathLike[str],
    *,
    epochs: float | None = None,
    given: Collection[str] = (),
) -> dict[str, str]:
    """Set the keys of a config that a COCO file decides, and log a line for each.

    Classes, masks, image size, anchors, limits of detections, sampler, learning rate and schedule follow from the file.
    In training, scale and colors vary, and the weights are averaged. Architecture, norms, initial weights and
    ``SOLVER.IMS_PER_BATCH`` stay as in the config.

    Args:
        cfg: Detectron2's config with this package's keys, not frozen. ``MODEL.DEVICE`` bounds image size and regions.
        json: the annotation file to train on; ``file_name`` in it is relative to the folder ``images``.
        images: see ``json``.
        epochs: passes over the images; default: by their number.
        given: keys that keep their values.

    Returns:
        For each changed key, its line with value and reason.

    Raises:
        DataError: the file is not in COCO format, or has no object to learn from.
    """
    reasons = apply_recipe(
        cfg, {os.fspath(json): os.fspath(images)}, epochs=epochs, given=given
    )
    for line in reasons.values():
        log.info(line)
    return reasons


def apply_recipe(
    cfg: CfgNode,
    files: Mapping[str, str],
    *,
    epochs: float | None,
    given: Collection[str],
    schedule_only: bool = False,
) -> dict[str, str]:
    """Run :func:`auto_config` for several files, without logging; or set only the schedule."""
    if not object_count_keys(cfg):
        raise ConfigError(
            f"--auto: MODEL.META_ARCHITECTURE ('{cfg.MODEL.META_ARCHITECTURE}') detects no objects."
        )
    if epochs is not None and not 0 < epochs < math.inf:
        raise ConfigError(
            f"--epochs ({epochs:g}): not above 0. Fix: give e.g. 20 passes over the images."
        )
    contents = [(folder, complete_coco(read_json(path))) for path, folder in files.items()]
    found = read_fingerprint(data for _, data in contents)
    if not len(found.boxes):
        raise DataError(
            f"--auto: {len(found.images)} images have no object to learn from ({found.crowds} crowds, "
            f"{found.unusable} without box, image or category). Fix: correct the annotations."
        )
    recipe = _Recipe(cfg, given)
    if not schedule_only:
        paths = [
            os.path.join(root, str(each.get("file_name")))
            for root, data in contents
            for each in data["images"]
        ]
        if not cfg.INPUT.PERCENTILES and any(map(is_deep, evenly_spread(paths, 20))):
            recipe.set("INPUT.PERCENTILES", [0.5, 99.5], "images have more than 8 bits")
        for step in (
            _classes_and_masks,
            _image_size,
            _augmentations,
            _anchors,
            _limits,
            _sampler,
            _solver,
        ):
            step(recipe, found)
    _schedule(recipe, found, epochs)
    return recipe.reasons


class _Recipe:
    """A config, and why its keys were set."""

    def __init__(self, cfg: CfgNode, given: Collection[str]) -> None:
        self.cfg, self.given, self.on_cpu = cfg, given, cfg.MODEL.DEVICE == "cpu"
        self.batch = cfg.SOLVER.IMS_PER_BATCH * max(1, cfg.SOLVER.ACCUMULATE)
        self.reasons: dict[str, str] = {}

    def set(self, key: str, value: Any, reason: str) -> None:
        """Set a key unless the user gave it or it has the value."""
        if key not in self.given and get_value(self.cfg, key) != value:
            self.cfg.merge_from_list([key, value])
            self.reasons[key] = f"--auto: {key} {value}: {reason}"


def _classes_and_masks(recipe: _Recipe, found: Fingerprint) -> None:
    for key in object_count_keys(recipe.cfg):
        recipe.set(key, len(found.classes), "the categories of the json")
    missing = found.masks["none"]
    if recipe.cfg.MODEL.MASK_ON and missing > len(found.boxes) / 2:  # the checks name fewer
        recipe.set(
            "MODEL.MASK_ON", False, f"{missing:,} of {len(found.boxes):,} objects have no mask"
        )
    if found.masks["rle"]:
        recipe.set(
            "INPUT.MASK_FORMAT", "bitmask", f"{found.masks['rle']:,} masks are run lengths"
        )


def _image_size(recipe: _Recipe, found: Fingerprint) -> None:
    """Choose the shorter side at which the class of the smallest objects gets enough pixels."""
    wanted, lowest, highest = (24, 160, 384) if recipe.on_cpu else (48, 480, 800)
    common = np.flatnonzero(
        found.per_class > 0.01 * len(found.boxes)
    )  # AP is a mean over classes: each counts

    def smallest(side: float, longest: float = math.inf) -> float:
        sizes = found.sizes(side, longest)
        return min(
            (np.quantile(sizes[found.category == index], 0.25) for index in common),
            default=np.median(sizes),
        )

    enlarged = 2 * np.median(
        found.images.min(axis=1)
    )  # beyond, pixels are interpolated from too few
    side = int(
        np.clip(32 * round(min(1000 * wanted / smallest(1000), enlarged) / 32), lowest, highest)
    )
    sides = tuple(round(side * scale) for scale in _SCALES)
    low, high = (
        smallest(each, recipe.cfg.INPUT.MAX_SIZE_TRAIN) for each in (sides[0], sides[-1])
    )
    advice = "; for more, cut the images into smaller ones" if high < wanted / 2 else ""
    recipe.set(
        "INPUT.MIN_SIZE_TRAIN",
        sides,
        f"small objects get {low:.0f} to {high:.0f} pixels{advice}",
    )
    recipe.set(
        "INPUT.SCALE_PER_BATCH",
        len(recipe.cfg.INPUT.MIN_SIZE_TRAIN) > 1,
        "images of a batch need less padding",
    )
    recipe.set("INPUT.MIN_SIZE_TEST", int(training_sides(recipe.cfg)[0]), "as in training")


def _augmentations(recipe: _Recipe, found: Fingerprint) -> None:
    if (
        not recipe.cfg.INPUT.AUGMENTATIONS and TorchVersion(torchvision.__version__) >= "0.24"
    ):  # older ones cannot
        recipe.set(
            "INPUT.AUGMENTATIONS",
            ["ColorJitter(0.3, 0.3, 0.3)"],
            "brightness, contrast and saturation vary",
        )


def _anchors(recipe: _Recipe, found: Fingerprint) -> None:
    """Scale the config's anchors, and choose their ratios, by the mean overlap of objects with the best anchor."""
    cfg, prefix = recipe.cfg, "MODEL.ANCHOR_GENERATOR."
    node, strides, sides = cfg.MODEL.ANCHOR_GENERATOR, anchor_strides(cfg), training_sides(cfg)
    factors = [1.0] if prefix + "SIZES" in recipe.given else 2 ** np.arange(-4, 4, 0.25)
    scaled = [
        [[max(1, round(factor * size)) for size in level] for level in node.SIZES]
        for factor in factors
    ]
    lists = (
        [node.ASPECT_RATIOS]
        if prefix + "ASPECT_RATIOS" in recipe.given
        else [[each] for each in _RATIOS]
    )
    before = best = anchor_fit(
        found, sides, anchor_shapes(node.SIZES, node.ASPECT_RATIOS, strides)
    )
    options = []
    for sizes, ratios in itertools.product(scaled, lists):
        anchors = anchor_shapes(sizes, ratios, strides)
        # the smallest of a level up to eight strides, as in Detectron2: its features show no more of an object
        if len(scaled) == 1 or all(
            anchors[anchors[:, 2] == s, :2].min() <= 8 * s for s in set(anchors[:, 2])
        ):
            options.append((anchor_fit(found, sides, anchors), sizes, ratios))
            best = max(best, options[-1][0])
    if best - before >= _NOTABLE:
        # of nearly equal anchors, those with the fewest ratios
        enough = [each for each in options if best - each[0] < _NOTABLE]
        after, sizes, ratios = min(enough, key=lambda each: (len(each[2][0]), -each[0]))
        reason = f"mean overlap of an object with its best anchor {before:.2f} -> {after:.2f}"
        recipe.set(prefix + "SIZES", sizes, reason)
        recipe.set(prefix + "ASPECT_RATIOS", ratios, reason)


def _limits(recipe: _Recipe, found: Fingerprint) -> None:
    """Raise the limits that dense images would exceed."""
    most, median = int(found.per_image.max()), float(np.median(found.per_image))
    limits = {"TEST.DETECTIONS_PER_IMAGE": (1.3 * most, 50, 1000)}
    regions = max(4 * median, min(8 * median, 128)) if recipe.on_cpu else 8 * median
    limits["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE"] = (regions, 64, 1024)
    for use in ("TRAIN", "TEST"):
        limits[f"MODEL.RPN.PRE_NMS_TOPK_{use}"] = (5 * most, 100, 2000)  # of a level
        limits[f"MODEL.RPN.POST_NMS_TOPK_{use}"] = (3 * most, 100, 2000)
    for key, (wanted, unit, highest) in limits.items():
        value = max(get_value(recipe.cfg, key), min(unit * math.ceil(wanted / unit), highest))
        recipe.set(key, value, f"images have up to {most} objects, in the median {median:g}")


def _sampler(recipe: _Recipe, found: Fingerprint) -> None:
    """Repeat the images of rare classes."""
    counts = found.images_per_class[found.images_per_class > 0]
    if counts.max() >= _RARE * counts.min():
        reason = f"a class is in {counts.min()} images, another one in {counts.max()}"
        recipe.set("DATALOADER.SAMPLER_TRAIN", "RepeatFactorTrainingSampler", reason)
        threshold = float(np.median(counts) / np.count_nonzero(found.per_image))
        recipe.set(
            "DATALOADER.REPEAT_THRESHOLD",
            round(threshold, 5),
            "images of rarer classes are repeated",
        )


def _solver(recipe: _Recipe, found: Fingerprint) -> None:
    """Average the weights; scale the COCO recipe's rate, or the small-batch study's for small networks from scratch."""
    recipe.set(
        "SOLVER.EMA", 0.999, "averaged weights have a higher AP before the learning rate drops"
    )
    cfg, images = recipe.cfg, recipe.batch
    if cfg.MODEL.WEIGHTS or cfg.MODEL.RESNETS.DEPTH > 34:
        rate = 0.01 if "RetinaNet" in cfg.MODEL.META_ARCHITECTURE else 0.02
        recipe.set("SOLVER.BASE_LR", rate * images / 16, f"{rate} for 16 images, here {images}")
        return
    grouped = cfg.MODEL.RESNETS.NORM.startswith("GN") and not cfg.MODEL.RESNETS.WHITEN_POSITIONS
    # with two images: twice the best rate on synthetic images, half of the best on real ones (experiments/)
    rate = max(0.02, (0.005 if grouped else 0.01) * images)
    recipe.set(
        "SOLVER.BASE_LR", rate, f"for {cfg.MODEL.RESNETS.NORM} from scratch, {images} images"
    )


def _schedule(recipe: _Recipe, found: Fingerprint, epochs: float | None) -> None:
    """Set the length by the number of images, and what depends on it."""
    images = np.count_nonzero(found.per_image)  # the others are not trained on
    passes = epochs or float(np.clip(12 * math.sqrt(1000 / images), 12, 100))
    iterations = max(1, math.ceil(passes * images / recipe.batch))
    recipe.set("SOLVER.MAX_ITER", iterations, f"{passes:.3g} passes over {images:,} images")
    iterations = recipe.cfg.SOLVER.MAX_ITER
    steps = tuple(sorted({3 * iterations // 4, 9 * iterations // 10} - {0}))
    recipe.set("SOLVER.STEPS", steps, "after 3/4 and 9/10 of the iterations")
    recipe.set("SOLVER.WARMUP_ITERS", min(500, iterations // 10), "the first tenth")
    times = int(
        np.clip(iterations * recipe.batch / images / 5, 1, 5)
    )  # an evaluation can take as long as a pass
    period = math.ceil(iterations / times)
    recipe.set(
        "TEST.EVAL_PERIOD", period, f"every five passes, at most five times; here {times}"
    )
    lost = math.ceil(period / math.ceil(period / max(2000, iterations / 20)))
    recipe.set("SOLVER.CHECKPOINT_PERIOD", lost, "iterations that a killed run can lose")
    if (
        (tests := recipe.cfg.DATASETS.TEST)
        and recipe.cfg.TEST.EVAL_PERIOD
        and not recipe.cfg.TEST.BEST
    ):
        score = _main_score(recipe.cfg, tests[0])
        recipe.set(
            "TEST.BEST",
            f"{tests[0]}/{score}" if len(tests) > 1 else score,
            "its best weights are kept",
        )


def _main_score(cfg: CfgNode, dataset: str) -> str:
    """Name the AP by which weights are kept: one that counts all objects of the dataset's images."""
    task, dense = (
        "keypoints" if cfg.MODEL.KEYPOINT_ON else "segm" if cfg.MODEL.MASK_ON else "bbox",
        "",
    )
    path = MetadataCatalog.get(dataset).get("json_file") if dataset in DatasetCatalog else None
    with contextlib.suppress(DataError, OSError):  # the checks before a run name the fault
        found = read_fingerprint([read_json(path)] if path else [])
        dense = found.dense_score(task, cfg.TEST.DETECTIONS_PER_IMAGE)
    return f"{task}/{dense or 'AP'}"
