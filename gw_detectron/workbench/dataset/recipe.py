"""Derive config keys from COCO files (``--auto``), each with its reason."""

import contextlib
import itertools
import logging
import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torchvision
from detectron2.config import CfgNode
from torch.torch_version import TorchVersion

from ...config import get_value
from ...errors import ConfigError, DataError
from ...modeling.build import object_count_keys
from ...weights.opening import is_detector
from ..images import evenly_spread, is_deep
from .coco_content import complete_coco
from .coco_scores import coco_tasks
from .data_fit import anchor_strides, training_sides
from .datasets_yaml import CocoDataset
from .fingerprint import Fingerprint, anchor_fit, anchor_shapes, join_fingerprints
from .layouts import read_labels
from .registration import open_dataset
from .source import CocoSource

log = logging.getLogger(__name__)

_RATIOS = (
    [0.5, 1.0, 2.0],
    [0.33, 0.57, 1.0, 1.75, 3.0],
    [0.12, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
)
_NOTABLE = 0.02  # a smaller gain of mean overlap changes no anchors
_RARE = 10  # a class is rare if another one is in so many times more images
# of images in training: their median is the scale of the evaluation
_SCALES = (0.75, 0.875, 1.0, 1.125, 1.25)


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
        json: the annotation file to train on, or a folder of labels; ``file_name`` is relative to ``images``.
        images: see ``json``.
        epochs: passes over the images; default: by their number.
        given: keys that keep their values.

    Returns:
        For each changed key, its line with value and reason.

    Raises:
        DataError: the file is not in COCO format, or has no object to learn from.
    """
    labels = read_labels(os.fspath(json), os.fspath(images))
    content, _ = complete_coco(labels.content)
    dataset = CocoDataset(labels.path, labels.images)
    source = CocoSource(dataset, labels._replace(content=content))
    reasons = apply_recipe(cfg, [source], epochs=epochs, given=given)
    for line in reasons.values():
        log.info(line)
    return reasons


def apply_recipe(
    cfg: CfgNode,
    sources: Sequence[CocoSource],
    *,
    epochs: float | None,
    given: Collection[str],
    flag: str = "--auto",
) -> dict[str, str]:
    """Run :func:`auto_config` for several files, without logging.

    Another ``flag`` than ``--auto``, which asks for a length, sets the schedule and the score by which weights are
    kept.
    """
    if not object_count_keys(cfg):
        raise ConfigError(
            f"{flag}: MODEL.META_ARCHITECTURE ('{cfg.MODEL.META_ARCHITECTURE}') detects no objects."
        )
    if epochs is not None and not 0 < epochs < math.inf:
        raise ConfigError(
            f"--epochs ({epochs:g}): not above 0. Fix: give e.g. 20 passes over the images."
        )
    data = join_fingerprints([source.fingerprint for source in sources])
    if not len(data.boxes):
        raise DataError(
            f"{flag}: {len(data.images)} images have no object to learn from: no annotations, or only crowds and "
            "objects without box, image or category. Fix: correct the annotations."
        )

    recipe = _Recipe(cfg, given, flag)
    if flag == "--auto":
        _deep_images(recipe, sources, data)
        _classes_and_masks(recipe, data)
        _image_size(recipe, data)
        _augmentations(recipe)
        _anchors(recipe, data)
        _limits(recipe, data)
        _sampler(recipe, data)
        _solver(recipe)
    _schedule(recipe, data, epochs)
    _kept_weights(recipe)
    return recipe.reasons


class _Recipe:
    """A config, and why its keys were set."""

    def __init__(self, cfg: CfgNode, given: Collection[str], flag: str) -> None:
        self.cfg = cfg
        self.flag = flag
        self.given = given
        self.on_cpu = cfg.MODEL.DEVICE == "cpu"
        #: class outputs apart, everything is trained already
        self.is_fine_tuned = is_detector(cfg.MODEL.WEIGHTS)
        self.batch = cfg.SOLVER.IMS_PER_BATCH * max(1, cfg.SOLVER.ACCUMULATE)
        self.reasons: dict[str, str] = {}

    def set(self, key: str, value: Any, reason: str) -> None:
        """Set a key unless the user gave it or it has the value."""
        if key not in self.given and get_value(self.cfg, key) != value:
            self.cfg.merge_from_list([key, value])
            self.reasons[key] = f"{self.flag}: {key} {value}: {reason}"


def _deep_images(
    recipe: _Recipe, sources: Sequence[CocoSource], data: Fingerprint
) -> None:
    """Choose percentiles that cut off a quarter of the objects' pixels at most, also in sparse images."""
    if recipe.cfg.INPUT.PERCENTILES:
        return

    paths = [
        os.path.join(source.dataset.images, str(image.get("file_name")))
        for source in sources
        for image in source.content["images"]
    ]

    if any(map(is_deep, evenly_spread(paths, 20))):
        areas = np.bincount(data.image, data.boxes.prod(axis=1), len(data.images))
        shares = 100 * areas / data.images.prod(axis=1)
        # a few with tiny objects would let hot pixels darken all
        covered = float(np.quantile(shares[shares > 0], 0.05, method="lower"))
        cut = min(0.5, float(f"{covered / 4:.1g}"))
        reason = f"images have more than 8 bits; objects cover {covered:.2g} % of sparse ones"
        recipe.set("INPUT.PERCENTILES", [cut, 100 - cut], reason)


def class_values(cfg: CfgNode, data: Fingerprint) -> dict[str, Any]:
    """Return the config keys that follow from classes and, where masks are RLE, from their format."""
    values: dict[str, Any] = {}
    if data.classes:
        values = dict.fromkeys(object_count_keys(cfg), len(data.classes))
    if data.masks["rle"]:
        # in which Detectron2 reads RLE, also for validation losses
        values["INPUT.MASK_FORMAT"] = "bitmask"
    return values


def _classes_and_masks(recipe: _Recipe, data: Fingerprint) -> None:
    for key, value in class_values(recipe.cfg, data).items():
        recipe.set(key, value, "as in the annotations")

    objects = len(data.boxes)
    without_mask = data.masks["none"]
    if recipe.cfg.MODEL.MASK_ON and without_mask > objects / 2:  # the checks name fewer
        reason = f"{without_mask:,} of {objects:,} objects have no mask"
        recipe.set("MODEL.MASK_ON", False, reason)


def _image_size(recipe: _Recipe, data: Fingerprint) -> None:
    """Choose the shorter side at which the class of the smallest objects gets enough pixels."""
    wanted, lowest, highest = (24, 160, 384) if recipe.on_cpu else (48, 480, 800)
    # AP is a mean over classes: each counts
    common = np.flatnonzero(data.per_class > 0.01 * len(data.boxes))

    def smallest(side: float, longest: float = math.inf) -> float:
        sizes = data.sizes(side, longest)
        quartiles = [
            np.quantile(sizes[data.category == index], 0.25) for index in common
        ]
        return min(quartiles, default=np.median(sizes))

    # beyond, pixels are interpolated from too few
    enlarged = 2 * np.median(data.images.min(axis=1))
    side = min(1000 * wanted / smallest(1000), enlarged)
    side = int(np.clip(32 * round(side / 32), lowest, highest))
    sides = tuple(round(side * scale) for scale in _SCALES)

    pixels = smallest(side, recipe.cfg.INPUT.MAX_SIZE_TRAIN)
    reason = f"small objects get {pixels:.0f} pixels"
    recipe.set("INPUT.MIN_SIZE_TRAIN", sides, reason)
    recipe.set(
        "INPUT.MIN_SIZE_TEST", int(training_sides(recipe.cfg)[0]), "as in training"
    )


def _augmentations(recipe: _Recipe) -> None:
    is_able = TorchVersion(torchvision.__version__) >= "0.24"
    if is_able and not recipe.cfg.INPUT.AUGMENTATIONS:
        jitter = ["ColorJitter(0.3, 0.3, 0.3)"]
        recipe.set(
            "INPUT.AUGMENTATIONS", jitter, "brightness, contrast and saturation vary"
        )


def _anchors(recipe: _Recipe, data: Fingerprint) -> None:
    """Scale the config's anchors, and choose their ratios, by the mean overlap with objects.

    A trained detector keeps its own: its outputs were trained for them.
    """
    if recipe.is_fine_tuned:
        return
    cfg = recipe.cfg
    size_key, ratio_key = (
        "MODEL.ANCHOR_GENERATOR.SIZES",
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS",
    )
    node = cfg.MODEL.ANCHOR_GENERATOR
    strides = anchor_strides(cfg)
    sides = training_sides(cfg)

    if {size_key, ratio_key} & set(recipe.given):
        return
    factors = 2 ** np.arange(-4, 4, 0.25)
    scaled = [
        [[max(1, round(factor * size)) for size in level] for level in node.SIZES]
        for factor in factors
    ]

    before = anchor_fit(
        data, sides, anchor_shapes(node.SIZES, node.ASPECT_RATIOS, strides)
    )
    options = []
    for sizes, ratios in itertools.product(scaled, _RATIOS):
        anchors = anchor_shapes(sizes, [ratios], strides)
        if _are_seen(anchors):
            options.append((anchor_fit(data, sides, anchors), sizes, [ratios]))

    best = max((fit for fit, _, _ in options), default=before)
    if best - before < _NOTABLE:
        return
    # of nearly equal anchors, those with the fewest ratios
    good = [option for option in options if best - option[0] < _NOTABLE]
    after, sizes, ratios = min(good, key=lambda option: (len(option[2][0]), -option[0]))
    reason = (
        f"mean overlap of an object with its best anchor {before:.2f} -> {after:.2f}"
    )
    recipe.set(size_key, sizes, reason)
    recipe.set(ratio_key, ratios, reason)


def _are_seen(anchors: np.ndarray) -> bool:
    """Return whether the smallest side of each level has at most eight strides, as in Detectron2.

    Features of a larger stride show no more of an object.
    """
    strides = anchors[:, 2]
    return all(anchors[strides == s, :2].min() <= 8 * s for s in np.unique(strides))


def _limits(recipe: _Recipe, data: Fingerprint) -> None:
    """Raise the limits that dense images would exceed."""
    most = int(data.per_image.max())
    median = float(np.median(data.per_image))
    regions = 8 * median
    if recipe.on_cpu:
        regions = max(4 * median, min(regions, 128))

    # key -> wanted number, its unit, the highest useful one
    limits = {
        "TEST.DETECTIONS_PER_IMAGE": (1.3 * most, 50, 1000),
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": (regions, 64, 1024),
    }
    for use in ("TRAIN", "TEST"):
        limits[f"MODEL.RPN.PRE_NMS_TOPK_{use}"] = (5 * most, 100, 2000)  # of a level
        limits[f"MODEL.RPN.POST_NMS_TOPK_{use}"] = (3 * most, 100, 2000)

    for key, (wanted, unit, highest) in limits.items():
        limit = min(unit * math.ceil(wanted / unit), highest)
        reason = f"images have up to {most} objects, in the median {median:g}"
        recipe.set(key, max(get_value(recipe.cfg, key), limit), reason)


def _sampler(recipe: _Recipe, data: Fingerprint) -> None:
    """Repeat the images of rare classes."""
    counts = data.images_per_class[data.images_per_class > 0]
    if counts.max() < _RARE * counts.min():
        return
    reason = f"a class is in {counts.min()} images, another one in {counts.max()}"
    recipe.set("DATALOADER.SAMPLER_TRAIN", "RepeatFactorTrainingSampler", reason)

    images = max(1, data.trained_images(recipe.cfg))
    threshold = round(float(np.median(counts) / images), 5)
    reason = "images of rarer classes are repeated"
    recipe.set("DATALOADER.REPEAT_THRESHOLD", threshold, reason)


def _solver(recipe: _Recipe) -> None:
    """Average the weights; scale the learning rate of the COCO recipe or of the small-batch study."""
    reason = "averaged weights have a higher AP before the learning rate drops"
    recipe.set("SOLVER.EMA", 0.999, reason)

    cfg = recipe.cfg
    images = recipe.batch
    norm = cfg.MODEL.RESNETS.NORM
    if cfg.MODEL.WEIGHTS or cfg.MODEL.RESNETS.DEPTH > 34:
        rate = 0.01 if "RetinaNet" in cfg.MODEL.META_ARCHITECTURE else 0.02
        reason = f"{rate} for 16 images, here {images}"
        if recipe.is_fine_tuned:
            rate /= 2
            reason += ", halved for a trained detector"
        recipe.set("SOLVER.BASE_LR", rate * images / 16, reason)
        return

    # with two images: twice the best rate on synthetic images, half of the best on real ones (experiments/)
    is_grouped = norm.startswith("GN") and not cfg.MODEL.RESNETS.WHITEN_POSITIONS
    rate = max(0.02, (0.005 if is_grouped else 0.01) * images)
    recipe.set("SOLVER.BASE_LR", rate, f"for {norm} from scratch, {images} images")


def _schedule(recipe: _Recipe, data: Fingerprint, epochs: float | None) -> None:
    """Set the length by the number of images, and what depends on it."""
    images = max(1, data.trained_images(recipe.cfg))
    passes = float(np.clip(12 * math.sqrt(1000 / images), 12, 100))
    if recipe.is_fine_tuned:
        passes /= 2
    passes = epochs or passes
    iterations = max(1, math.ceil(passes * images / recipe.batch))
    recipe.set(
        "SOLVER.MAX_ITER", iterations, f"{passes:.3g} passes over {images:,} images"
    )

    iterations = recipe.cfg.SOLVER.MAX_ITER
    steps = tuple(sorted({3 * iterations // 4, 9 * iterations // 10} - {0}))
    recipe.set("SOLVER.STEPS", steps, "after 3/4 and 9/10 of the iterations")
    recipe.set("SOLVER.WARMUP_ITERS", min(500, iterations // 10), "the first tenth")

    # an evaluation can take as long as a pass
    times = int(np.clip(iterations * recipe.batch / images / 5, 1, 5))
    period = math.ceil(iterations / times)
    reason = f"every five passes, at most five times; here {times}"
    recipe.set("TEST.EVAL_PERIOD", period, reason)
    # between two evaluations, whose period may be given
    period = recipe.cfg.TEST.EVAL_PERIOD or iterations
    longest = min(max(2000, iterations / 20), iterations / 10)
    checkpoints = math.ceil(period / longest)
    reason = "iterations that a killed run can lose"
    recipe.set("SOLVER.CHECKPOINT_PERIOD", math.ceil(period / checkpoints), reason)


def _kept_weights(recipe: _Recipe) -> None:
    """Keep the weights of the best AP that counts all objects of the images."""
    cfg = recipe.cfg
    if not cfg.DATASETS.TEST or not cfg.TEST.EVAL_PERIOD or cfg.TEST.BEST:
        return
    task = coco_tasks(cfg)[-1]
    name = cfg.DATASETS.TEST[0]
    dense = ""
    # the checks before a run name the fault
    with contextlib.suppress(DataError, OSError):
        source = open_dataset(name)
        if source is not None:
            dense = source.fingerprint.dense_score(task, cfg.TEST.DETECTIONS_PER_IMAGE)

    score = f"{task}/{dense or 'AP'}"
    if len(cfg.DATASETS.TEST) > 1:
        score = f"{name}/{score}"
    recipe.set("TEST.BEST", score, "its best weights are kept")
