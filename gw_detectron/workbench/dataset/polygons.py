"""COCO annotations of a synthetic scene's objects.

A COCO polygon has no holes. A region with a hole (a ring, or a large object behind a small one) is cut through the
hole, along a line between two pixel columns, into polygons without holes.
"""

import itertools
from typing import Any

import numpy as np
import pycocotools.mask as mask_util

from .geometry import mask_boxes
from .scene import Array, SceneObject

_TOLERANCE = 0.05  # pixels, largest distance between a traced contour and its polygon
_MIN_AREA = 1.0  # pixels, of a polygon that is kept


def to_coco(obj: SceneObject, image_id: int, annotation_id: int) -> dict[str, Any]:
    """Build the COCO annotation of an object's visible part: polygons, or uncompressed run lengths of a crowd."""
    mask = obj.mask
    segmentation: dict[str, Any] | list[list[float]]
    if obj.crowd:
        segmentation = {"size": list(mask.shape), "counts": run_lengths(mask)}
        rle = mask_util.encode(np.asfortranarray(mask, dtype=np.uint8))
        box = mask_util.toBbox(rle).tolist()
    else:
        polygons = trace(obj.visible)
        segmentation = [polygon.ravel().tolist() for polygon in polygons]
        rle = mask_util.merge(mask_util.frPyObjects(segmentation, *mask.shape))
        corners = np.concatenate(polygons)
        low, high = corners.min(axis=0), corners.max(axis=0)
        box = [round(float(value), 2) for value in (*low, *(high - low))]
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": obj.category + 1,
        "iscrowd": int(obj.crowd),
        "segmentation": segmentation,
        "area": float(mask_util.area(rle)),
        "bbox": box,
    }


def run_lengths(mask: Array) -> list[int]:
    """Compute COCO's uncompressed RLE counts of a mask (H, W); pycocotools returns only compressed ones."""
    runs = [
        (value, sum(1 for _ in run))
        for value, run in itertools.groupby(mask.ravel(order="F").tolist())
    ]
    background_first = [0] if runs[0][0] else []
    return background_first + [length for _, length in runs]


def trace(sdf: Array) -> list[Array]:
    """Trace the region where a signed distance field, (H + 2, W + 2), positive on its border, is negative.

    Returns polygons (K, 2) of (x, y) in pixels, without holes, rounded to 0.01. The image's corner is (0, 0).
    """
    import contourpy  # comes with matplotlib; only the generation of the dataset needs it

    height, width = sdf.shape
    columns, rows = np.arange(width) - 0.5, np.arange(height) - 0.5
    generator = contourpy.contour_generator(
        columns, rows, sdf, fill_type=contourpy.FillType.OuterOffset
    )
    filled: Any = generator.filled(-np.inf, 0.0)
    contours = []
    for points, offsets in zip(*filled, strict=True):
        contours.append(points[: offsets[1]])
        for first, last in itertools.pairwise(offsets[1:]):
            low, high = points[first:last, 0].min(), points[first:last, 0].max()
            cut = np.rint((low + high) / 2)
            if low < cut < high:
                left = columns - cut
                return trace(np.maximum(sdf, left)) + trace(np.maximum(sdf, -left))
    # The remaining holes are narrower than a pixel and are ignored.
    areas = mask_boxes(
        [[contour.ravel().tolist()] for contour in contours], [(height, width)] * len(contours)
    )[1]
    smallest = min(_MIN_AREA, max(areas, default=0.0))
    kept = [
        (contour, _simplify(contour))
        for contour, area in zip(contours, areas, strict=True)
        if area >= smallest
    ]
    return [
        np.round(polygon if len(polygon) > 3 else contour, 2)[:-1] for contour, polygon in kept
    ]


def _simplify(line: Array) -> Array:
    """Drop points of a line (K, 2) within the tolerance (Douglas and Peucker 1973); OpenCV would drop other ones."""
    if len(line) < 3:
        return line
    chord, offset = line[-1] - line[0], line[1:-1] - line[0]
    length, cross = np.hypot(*chord), offset[:, 0] * chord[1] - offset[:, 1] * chord[0]
    distance = np.abs(cross) / length if length > 0 else np.hypot(*offset.T)
    split = int(np.argmax(distance)) + 1
    if distance[split - 1] <= _TOLERANCE:
        return line[[0, -1]]
    return np.concatenate([_simplify(line[: split + 1])[:-1], _simplify(line[split:])])
