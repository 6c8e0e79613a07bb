"""Check boxes and masks of COCO annotations against their images and each other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import faults as f
from .faults import Fault
from .geometry import (
    Flags,
    Floats,
    corners,
    far_apart,
    is_coordinates,
    is_polygon,
    mask_boxes,
)


class DatasetNeeds(NamedTuple):
    """What a run needs of a dataset, as :mod:`.dataset_checks` reads it from the config."""

    training: bool  # else evaluation
    masks: bool = False
    run_lengths: bool = True  # a segmentation may be an RLE
    keypoints: int = 0  # per object
    percentiles: Sequence[float] = ()  # for images of more than 8 bits

    def fields(self) -> set[str]:
        """Return the fields that every annotation needs."""
        fields = {"id", "image_id", "category_id", "bbox"}
        if not self.training:  # pycocotools reads them
            fields |= {"area", "iscrowd"}
        if self.keypoints:
            fields.add("keypoints")
            if not self.training:
                fields.add("num_keypoints")
        return fields


class _Shapes(NamedTuple):
    """Boxes and masks of N annotations."""

    boxes: Floats  # x, y, width, height, (N, 4)
    limits: Floats  # width, height, width, height of the image, (N, 4)
    masks: list[Any]
    outlines: Floats  # x0, y0, x1, y1 of the masks, (N, 4); NaN where none is usable
    areas: Floats  # of the masks, (N)
    is_crowd: Flags


def shape_faults(
    annotations: list[dict[str, Any]], images: Mapping[Any, dict], needs: DatasetNeeds
) -> dict[Fault, Flags]:
    """Return which annotations have each fault."""
    shapes = _measure(annotations, images)
    faults = _box_faults(shapes)

    # where box and mask differ, the mask is the surer sign
    comparable = ~shapes.is_crowd & ~faults[f.NO_AREA] & (shapes.areas > 0)
    edges = corners(shapes.boxes)
    sizes = shapes.limits[:, 1::-1]
    apart = comparable & far_apart(edges, shapes.outlines, sizes)
    faults = {fault: flags & ~apart for fault, flags in faults.items()}

    unlimited = np.full_like(sizes, np.inf)
    as_corners = ~far_apart(shapes.boxes, shapes.outlines, unlimited)
    begins_inside = shapes.outlines[:, :2] > edges[:, :2] - 1
    ends_inside = shapes.outlines[:, 2:] < edges[:, 2:] + 1
    is_inside = (begins_inside & ends_inside).all(axis=1)
    faults[f.MASK_CORNERS] = apart & as_corners
    faults[f.SMALLER] = apart & ~as_corners & is_inside
    faults[f.APART] = apart & ~as_corners & ~is_inside

    faults |= _mask_faults(shapes, needs)

    keys = [(a["image_id"], a["category_id"], *a["bbox"]) for a in annotations]
    counts = Counter(keys)
    faults[f.REPEATED] = np.array([counts[key] > 1 for key in keys])
    faults[f.CROWDS] = shapes.is_crowd
    faults[f.ROTATED] = np.array([_is_rotated(a) for a in annotations])
    return faults


def _is_rotated(annotation: Mapping[str, Any]) -> bool:
    """Return whether a box is one that CVAT turns by an attribute."""
    attributes = annotation.get("attributes")
    angle = attributes.get("rotation") if isinstance(attributes, dict) else None
    return bool(angle) and not annotation.get("segmentation")


def _measure(annotations: list[dict[str, Any]], images: Mapping[Any, dict]) -> _Shapes:
    owners = [images[annotation["image_id"]] for annotation in annotations]
    sizes = [(image["height"], image["width"]) for image in owners]
    masks = [annotation.get("segmentation") for annotation in annotations]
    outlines, areas = mask_boxes(masks, sizes)

    boxes = np.array([annotation["bbox"] for annotation in annotations], float)
    limits = np.tile(np.array(sizes, float)[:, ::-1], 2)
    is_crowd = np.array([bool(annotation.get("iscrowd")) for annotation in annotations])
    return _Shapes(boxes, limits, masks, outlines, areas, is_crowd)


def _box_faults(shapes: _Shapes) -> dict[Fault, Flags]:
    boxes, limits = shapes.boxes, shapes.limits
    edges = corners(boxes)
    inside = np.clip(edges, 0, limits)
    is_empty = (boxes[:, 2:] <= 0).any(axis=1)
    is_outside = (inside[:, 2:] <= inside[:, :2]).any(axis=1) & ~is_empty

    # one pixel: rounding
    is_off = (edges > limits + 1).any(axis=1)
    in_order = (boxes[:, :2] < boxes[:, 2:]).all(axis=1)
    fits_as_corners = in_order & (boxes <= limits + 1).all(axis=1)
    return {
        f.NO_AREA: is_empty,
        f.OUTSIDE: is_outside,
        f.CORNERS: is_off & fits_as_corners,
        f.NORMALIZED: boxes.max(axis=1) <= 1,
    }


def _mask_faults(shapes: _Shapes, needs: DatasetNeeds) -> dict[Fault, Flags]:
    """Find segmentations that Detectron2 cannot read."""
    masks = shapes.masks
    is_given = np.array([bool(mask) for mask in masks])
    is_rle = np.array([isinstance(mask, dict) for mask in masks])
    is_flat = np.array([_is_flat(mask) for mask in masks])
    is_drawn = np.array([_is_drawn(mask) for mask in masks])
    is_used = ~(shapes.is_crowd & needs.training)
    is_unusable = np.isnan(shapes.areas)

    faults = {
        # without masks, too, Detectron2 drops an object without a valid polygon, with its box
        f.NO_POLYGON: ~shapes.is_crowd & is_given & is_flat & ~is_drawn & ~is_rle,
        f.NO_COORDINATES: is_used & ~is_flat,
    }
    if needs.masks:
        faults[f.NO_COORDINATES] |= is_used & is_drawn & is_unusable
        faults[f.NO_MASK] = is_used & ~is_given
        faults[f.RUN_LENGTHS] = ~shapes.is_crowd & is_rle & (not needs.run_lengths)
        faults[f.OTHER_SIZE] = is_used & is_rle & is_unusable
        faults[f.NO_PIXEL] = is_used & (shapes.areas == 0)
    return faults


def _is_flat(mask: Any) -> bool:
    """Return whether all polygons of a segmentation, if it has polygons, are lists of numbers."""
    if not mask or isinstance(mask, dict):
        return True
    return isinstance(mask, list) and all(map(is_coordinates, mask))


def _is_drawn(mask: Any) -> bool:
    return isinstance(mask, list) and any(map(is_polygon, mask))
