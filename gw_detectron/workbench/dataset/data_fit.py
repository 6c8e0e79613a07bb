"""Compare a detector's limits, image sizes and anchors with the objects of its datasets."""

from collections.abc import Iterator, Mapping

import numpy as np
from detectron2.config import CfgNode

from ...config import anchor_strides, get_value, training_sides
from ...modeling.build import object_count_keys
from .fingerprint import Fingerprint, anchor_shapes, best_overlaps

_AUTO = "give --auto, which sets it by the data"


def check_fit(
    cfg: CfgNode, data: Mapping[str, Fingerprint], *, eval_only: bool
) -> Iterator[str]:
    """Yield a warning, with numbers, for each value of a config that loses objects of the known datasets."""
    counts = object_count_keys(cfg)
    trained, tested = (
        {
            name: data[name]
            for name in names
            if counts and name in data and len(data[name].boxes)
        }
        for names in (() if eval_only else cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    )
    yield from _low_limit(cfg, tested, "TEST.DETECTIONS_PER_IMAGE", "cannot be found")
    if "MODEL.ROI_HEADS.NUM_CLASSES" in counts:
        share = cfg.MODEL.ROI_HEADS.POSITIVE_FRACTION
        yield from _low_limit(cfg, tested, "MODEL.RPN.POST_NMS_TOPK_TEST", "cannot be found")
        yield from _low_limit(cfg, trained, "MODEL.RPN.POST_NMS_TOPK_TRAIN", "are not proposed")
        key = "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE"
        # a few denser images do no harm: each step draws other objects of them
        limit = share * get_value(cfg, key)
        dense = {
            name: each for name, each in trained.items() if np.median(each.per_image) > limit
        }
        yield from _low_limit(cfg, dense, key, "are left out of a step", share)
    sides, test_sides = training_sides(cfg), (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    boxes = np.concatenate(
        [np.empty((0, 2)), *(each.resized(*sides) for each in trained.values())]
    )
    if not len(boxes):
        return
    sizes = np.sqrt(boxes.prod(axis=1))
    for name, each in tested.items():
        if not 0.5 < (size := np.median(each.sizes(*test_sides))) / np.median(sizes) < 2:
            yield (
                f"INPUT.MIN_SIZE_TEST, MAX_SIZE_TEST ({test_sides}): objects have {size:.0f} pixels (median) in {name} "
                f"and {np.median(sizes):.0f} in the training. Fix: choose sides that give them the same size."
            )
    node = cfg.MODEL.ANCHOR_GENERATOR
    anchors = anchor_shapes(node.SIZES, node.ASPECT_RATIOS, anchor_strides(cfg)) * [
        1,
        1,
        0,
    ]  # at the objects' centers
    if (poor := best_overlaps(boxes, anchors) < 0.5).mean() > 1 / 3:
        scales, (low, high) = (
            np.sqrt(anchors[:, :2].prod(axis=1)),
            np.quantile(sizes, (0.05, 0.95)),
        )
        yield (
            f"MODEL.ANCHOR_GENERATOR.SIZES ({scales.min():.0f} to {scales.max():.0f} pixels): {poor.sum()} of "
            f"{len(boxes)} objects overlap no anchor by half. 90 % of them have {low:.0f} to {high:.0f} pixels in "
            f"training. Fix: choose SIZES and ASPECT_RATIOS, or INPUT.MIN_SIZE_TRAIN, by these, or {_AUTO}."
        )


def _low_limit(
    cfg: CfgNode,
    datasets: Mapping[str, Fingerprint],
    key: str,
    consequence: str,
    share: float = 1.0,
) -> Iterator[str]:
    """Warn where images have more objects than ``share`` of a limit, if more than 1 % of the objects are lost."""
    limit = int(share * get_value(cfg, key))
    for name, each in datasets.items():
        lost, most = np.maximum(each.per_image - limit, 0).sum(), each.per_image.max()
        if lost > 0.01 * len(each.boxes):
            images = f"{(each.per_image > limit).sum()} of {len(each.images)} images of {name}"
            yield (
                f"{key} ({get_value(cfg, key)}): {images} have more than {limit} objects, up to {most}: {lost} of "
                f"{len(each.boxes)} objects {consequence}. Fix: set {key} "
                f"{100 * int(np.ceil(1.5 * most / share / 100))}, or {_AUTO}."
            )
