"""Compare a detector's limits, image sizes and anchors with the objects of its datasets."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from detectron2.config import CfgNode

from ...config import get_value
from ...errors import CheckReport
from ...modeling.build import object_count_keys
from .fingerprint import Fingerprint, anchor_shapes, best_overlaps
from .source import own_source

_AUTO = "give --auto, which sets it by the data"


def check_fit(
    cfg: CfgNode,
    fingerprints: Mapping[str, Fingerprint],
    report: CheckReport,
    *,
    eval_only: bool,
) -> None:
    """Warn, with numbers, of each value of a config that loses objects."""
    counts = object_count_keys(cfg)
    with_objects = {
        name: data for name, data in fingerprints.items() if len(data.boxes)
    }
    if not counts or not with_objects:
        return
    tested = _of_names(with_objects, cfg.DATASETS.TEST)
    trained = {} if eval_only else _of_names(with_objects, cfg.DATASETS.TRAIN)

    key = "TEST.DETECTIONS_PER_IMAGE"
    if get_value(cfg, key) >= 0:  # -1: no limit
        _check_limit(cfg, tested, key, "cannot be found", report)
    if "MODEL.ROI_HEADS.NUM_CLASSES" in counts:
        key = "MODEL.RPN.POST_NMS_TOPK"
        _check_limit(cfg, tested, f"{key}_TEST", "cannot be found", report)
        _check_limit(cfg, trained, f"{key}_TRAIN", "are not proposed", report)
        _check_batch(cfg, trained, report)
    _check_images(cfg, trained, report)
    if trained:
        sides = training_sides(cfg)
        boxes = np.concatenate([data.resized(*sides) for data in trained.values()])
        _check_anchors(cfg, boxes, report)


def _of_names(
    data: Mapping[str, Fingerprint], names: Sequence[str]
) -> dict[str, Fingerprint]:
    return {name: data[name] for name in names if name in data}


def _check_images(
    cfg: CfgNode, trained: Mapping[str, Fingerprint], report: CheckReport
) -> None:
    """Warn of images that are not trained on."""
    is_filtered = cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
    for name, data in trained.items():
        empty = np.count_nonzero(~data.is_annotated)
        if empty and is_filtered:
            report.warnings.append(
                f"DATALOADER.FILTER_EMPTY_ANNOTATIONS (True): {empty} of {len(data.images)} images of {name} have no "
                "object and are not trained on. Fix: set it to False to learn from them, against false alarms."
            )

        unused = len(data.images) - data.trained_images(cfg) - empty * is_filtered
        if unused:
            key = "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE"
            report.warnings.append(
                f"{key} ({get_value(cfg, key)}): {unused} of {len(data.images)} images of {name} have fewer labeled "
                f"keypoints and are not trained on. Fix: set {key} 0 to learn their boxes."
            )


def _check_batch(
    cfg: CfgNode, trained: Mapping[str, Fingerprint], report: CheckReport
) -> None:
    key = "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE"
    share = cfg.MODEL.ROI_HEADS.POSITIVE_FRACTION
    # a few denser images do no harm: each step draws other objects of them
    limit = share * get_value(cfg, key)
    dense = {
        name: data
        for name, data in trained.items()
        if np.median(data.per_image) > limit
    }
    _check_limit(cfg, dense, key, "are left out of a step", report, share)


def _check_anchors(cfg: CfgNode, boxes: np.ndarray, report: CheckReport) -> None:
    """Warn if more than a third of the resized boxes overlap no anchor by half."""
    node = cfg.MODEL.ANCHOR_GENERATOR
    anchors = anchor_shapes(node.SIZES, node.ASPECT_RATIOS, anchor_strides(cfg))
    centered = anchors * [1, 1, 0]  # at the objects' centers
    is_poor = best_overlaps(boxes, centered) < 0.5
    if is_poor.mean() <= 1 / 3:
        return

    scales = np.sqrt(anchors[:, :2].prod(axis=1))
    low, high = np.quantile(np.sqrt(boxes.prod(axis=1)), (0.05, 0.95))
    report.warnings.append(
        f"MODEL.ANCHOR_GENERATOR.SIZES ({scales.min():.0f} to {scales.max():.0f} pixels): {is_poor.sum()} of "
        f"{len(boxes)} objects overlap no anchor by half. 90 % of them have {low:.0f} to {high:.0f} pixels in "
        f"training. Fix: choose SIZES and ASPECT_RATIOS, or INPUT.MIN_SIZE_TRAIN, by these, or {_AUTO}."
    )


def _check_limit(
    cfg: CfgNode,
    datasets: Mapping[str, Fingerprint],
    key: str,
    consequence: str,
    report: CheckReport,
    share: float = 1.0,
) -> None:
    """Warn where images have more objects than ``share`` of a limit, if over 1 % of the objects are lost."""
    given = get_value(cfg, key)
    limit = int(share * given)
    for name, data in datasets.items():
        lost = np.maximum(data.per_image - limit, 0).sum()
        objects = len(data.boxes)
        if lost <= 0.01 * objects:
            continue
        most = data.per_image.max()
        wanted = 100 * int(np.ceil(1.5 * most / share / 100))
        report.warnings.append(
            f"{key} ({given}): {(data.per_image > limit).sum()} of {len(data.images)} images of {name} have more than "
            f"{limit} objects, up to {most}: {lost} of {objects} objects {consequence}. Fix: set {key} {wanted}, or "
            f"{_AUTO}."
        )


def training_sides(cfg: CfgNode) -> tuple[float, float]:
    """Return the shorter side, of several their median, and the longest one, to which training resizes images."""
    return float(statistics.median(cfg.INPUT.MIN_SIZE_TRAIN)), float(
        cfg.INPUT.MAX_SIZE_TRAIN
    )


def training_scale(cfg: CfgNode) -> float:
    """Return the median factor by which training resizes images of this package's datasets; 0 without one."""
    sources = filter(None, map(own_source, cfg.DATASETS.TRAIN))
    images = [source.fingerprint.images for source in sources]
    if not images:
        return 0.0
    shorter, longest = training_sides(cfg)
    if not shorter:
        return 1.0

    sides = np.concatenate(images)
    factors = np.minimum(shorter / sides.min(axis=1), longest / sides.max(axis=1))
    return float(np.median(factors))


def anchor_strides(cfg: CfgNode) -> list[int]:
    """Return the strides of the feature maps with anchors."""
    uses_rpn = "RetinaNet" not in cfg.MODEL.META_ARCHITECTURE
    node = cfg.MODEL.RPN if uses_rpn else cfg.MODEL.RETINANET
    strides = []
    for name in node.IN_FEATURES:  # such as p2, res4
        level = name[-1]
        strides.append(2 ** int(level) if level.isdigit() else 16)
    return strides
