"""Turn fields and masks (see `rendering`) into COCO annotations: polygons, run lengths, boxes and areas.

A COCO polygon cannot have a hole. A region with one (a ring, or a large object with a small one on it) is cut
through the hole, along a line between two pixel columns, into polygons that have none.
"""

from __future__ import annotations

import itertools
from typing import Any

import contourpy
import numpy as np
import pycocotools.mask as mask_util

from .rendering import Array, Layer

# A simplified outline stays this near to the traced one, in pixels; fragments below this area are left out.
_TOLERANCE = 0.05
_MIN_FRAGMENT = 1.0


def annotate(layer: Layer, image_id: int, annotation_id: int) -> dict[str, Any]:
    """Describe the visible part of a layer as a COCO annotation.

    Args:
        layer: from `Scene.layers`, once the scene is complete.
        image_id: unique over both splits.
        annotation_id: unique over both splits.

    Returns:
        The annotation with category_id from 1; polygons for an object, uncompressed run lengths for a crowd.
        `area` is that of the rasterised segmentation, in pixels; `bbox` is the XYWH box of the polygons,
        or of the crowd's mask.
    """
    mask = layer.mask
    height, width = mask.shape
    segmentation: dict[str, Any] | list[list[float]]
    if layer.crowd:
        segmentation = {"size": [height, width], "counts": run_lengths(mask)}
        rle = mask_util.frPyObjects(segmentation, height, width)
        box = mask_util.toBbox(rle).tolist()
    else:
        polygons = trace(layer.visible)
        segmentation = [polygon.ravel().tolist() for polygon in polygons]
        rle = mask_util.merge(mask_util.frPyObjects(segmentation, height, width))
        corners = np.concatenate(polygons)
        low, high = corners.min(axis=0), corners.max(axis=0)
        box = [round(float(value), 2) for value in (*low, *(high - low))]
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": layer.category + 1,
        "iscrowd": int(layer.crowd),
        "segmentation": segmentation,
        "area": float(mask_util.area(rle)),
        "bbox": box,
    }


def run_lengths(mask: Array) -> list[int]:
    """Return COCO's uncompressed run lengths of a mask (H, W), column by column, starting outside."""
    flat = np.concatenate([[False], mask.ravel(order="F"), [False]])
    ends = np.flatnonzero(flat[1:] != flat[:-1]).tolist()
    if mask.size not in ends[-1:]:
        ends.append(mask.size)
    return np.diff(ends, prepend=0).tolist()


def trace(field: Array) -> list[Array]:
    """Return the outlines of the region where a field is negative, without holes.

    Args:
        field: (H + 2, W + 2), positive on its outermost samples.

    Returns:
        Polygons (K, 2) of (x, y) in pixels, the image's corner being (0, 0), rounded to 0.01; largest first.
    """
    height, width = field.shape
    columns, rows = np.arange(width) - 0.5, np.arange(height) - 0.5
    tracer = contourpy.contour_generator(columns, rows, field, fill_type=contourpy.FillType.OuterOffset)
    filled: Any = tracer.filled(-np.inf, 0.0)
    lines, offsets = filled
    for points, starts in zip(lines, offsets, strict=True):
        for first, last in itertools.pairwise(starts[1:]):
            low, high = points[first:last, 0].min(), points[first:last, 0].max()
            cut = np.rint((low + high) / 2)
            if low < cut < high:
                left = columns - cut
                return trace(np.maximum(field, left)) + trace(np.maximum(field, -left))
    # Holes that are left are narrower than a pixel; the outer outline alone stands for those parts.
    polygons = [points[: starts[1]] for points, starts in zip(lines, offsets, strict=True)]
    areas = [_area(polygon) for polygon in polygons]
    smallest = min(_MIN_FRAGMENT, max(areas, default=0.0))
    kept = [polygon for polygon, area in zip(polygons, areas, strict=True) if area >= smallest]
    return [np.round(_simplify(polygon), 2) for polygon in kept]


def _area(polygon: Array) -> float:
    """Return the area of a closed polygon (K, 2) by the shoelace formula."""
    x, y = polygon[:-1].T
    return 0.5 * abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))))


def _simplify(polygon: Array) -> Array:
    """Drop vertices of a closed polygon that lie within the tolerance of the line between their neighbours.

    Args:
        polygon: (K, 2), the last point equal to the first.

    Returns:
        (L, 2) with 3 <= L < K, without the repeated point.

    Source: Douglas and Peucker 1973, started from the two vertices farthest apart.
    """
    far = int(np.argmax(np.hypot(*(polygon - polygon[0]).T)))
    keep = np.zeros(len(polygon), dtype=bool)
    keep[[0, far]] = True
    spans = [(0, far), (far, len(polygon) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        chord = polygon[last] - polygon[first]
        offset = polygon[first + 1 : last] - polygon[first]
        length = np.hypot(*chord)
        if length > 0:
            distance = np.abs(offset[:, 0] * chord[1] - offset[:, 1] * chord[0]) / length
        else:
            distance = np.hypot(*offset.T)
        split = int(np.argmax(distance))
        if distance[split] > _TOLERANCE:
            keep[first + 1 + split] = True
            spans += [(first, first + 1 + split), (first + 1 + split, last)]
    return polygon[keep] if keep.sum() >= 3 else polygon[:-1]
