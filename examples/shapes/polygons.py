"""COCO annotations of a scene's objects.

A COCO polygon has no holes. A region with a hole (a ring, or a large object behind a small one) is
cut through the hole, along a line between two pixel columns, into polygons without holes.
"""

from typing import Any

import contourpy
import numpy as np
import pycocotools.mask as mask_util

from .outlines import Array
from .scene import SceneObject

_TOLERANCE = 0.05  # pixels, largest distance between a traced contour and its polygon
_MIN_AREA = 1.0  # pixels, of a polygon that is kept


def to_coco(shown: SceneObject, image_id: int, annotation_id: int) -> dict[str, Any]:
    """Build the COCO annotation of an object's visible part.

    The mask is polygons, of a crowd uncompressed run lengths.
    """
    mask = shown.mask
    segmentation: dict[str, Any] | list[list[float]]
    if shown.crowd:
        segmentation = {"size": list(mask.shape), "counts": run_lengths(mask)}
        encoded = mask_util.encode(np.asfortranarray(mask, dtype=np.uint8))
        box = mask_util.toBbox(encoded).tolist()
    else:
        polygons = trace(shown.visible)
        segmentation = [polygon.ravel().tolist() for polygon in polygons]
        encoded = mask_util.merge(mask_util.frPyObjects(segmentation, *mask.shape))
        box = _box(np.concatenate(polygons))

    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": shown.category + 1,
        "iscrowd": int(shown.crowd),
        "segmentation": segmentation,
        "area": float(mask_util.area(encoded)),
        "bbox": box,
    }


def run_lengths(mask: Array) -> list[int]:
    """Compute COCO's uncompressed RLE counts of a mask (H, W).

    pycocotools returns only compressed ones.
    """
    pixels = mask.ravel(order="F")
    changes = np.flatnonzero(np.diff(pixels)) + 1
    borders = [0, *changes, pixels.size]
    lengths = np.diff(borders).tolist()

    is_background_first = not pixels[0]
    return lengths if is_background_first else [0, *lengths]


def trace(sdf: Array) -> list[Array]:
    """Trace the region where a signed distance field is negative.

    Args:
        sdf: (H + 2, W + 2), positive on its border.

    Returns:
        Polygons (K, 2) of x and y in pixels, without holes, rounded to 0.01. The image's corner
        is (0, 0).
    """
    height, width = sdf.shape
    columns = np.arange(width) - 0.5
    rows = np.arange(height) - 0.5
    generator = contourpy.contour_generator(
        columns, rows, sdf, fill_type=contourpy.FillType.OuterOffset
    )
    filled: Any = generator.filled(-np.inf, 0.0)

    contours = []
    for points, offsets in zip(*filled, strict=True):
        starts = offsets[1:-1]
        outer, *holes = np.split(points, starts)
        contours.append(outer)
        for hole in holes:
            x, _ = hole.T
            low = x.min()
            high = x.max()
            cut = np.rint((low + high) / 2)
            if low < cut < high:
                left = np.maximum(sdf, columns - cut)
                right = np.maximum(sdf, cut - columns)
                return trace(left) + trace(right)
            # A hole that is narrower than a pixel is ignored.

    largest = max(map(_area, contours), default=0.0)
    smallest = min(_MIN_AREA, largest)
    return [_polygon(contour) for contour in contours if _area(contour) >= smallest]


def _box(points: Array) -> list[float]:
    """Return x, y, width and height of points, (K, 2)."""
    low = points.min(axis=0)
    size = points.max(axis=0) - low
    return np.round([*low, *size], 2).tolist()


def _area(contour: Array) -> float:
    """Compute the area of a closed contour (K, 2) by the shoelace formula."""
    x, y = contour.T
    forward = np.dot(x[:-1], y[1:])
    backward = np.dot(x[1:], y[:-1])
    return abs(forward - backward) / 2


def _polygon(contour: Array) -> Array:
    """Simplify and round a closed contour, (K, 2), and drop its last point, which is the first."""
    simple = _simplify(contour)
    if len(simple) <= 3:  # no area is left
        simple = contour
    return np.round(simple, 2)[:-1]


def _simplify(line: Array) -> Array:
    """Drop points of a line (K, 2) within the tolerance.

    Source: Douglas and Peucker 1973. OpenCV would drop other points.
    """
    if len(line) < 3:
        return line

    chord = line[-1] - line[0]
    offset = line[1:-1] - line[0]
    length = np.hypot(*chord)
    if length > 0:
        x, y = offset.T
        cross = x * chord[1] - y * chord[0]
        distance = np.abs(cross) / length
    else:
        distance = np.hypot(*offset.T)

    farthest = int(np.argmax(distance)) + 1
    if distance[farthest - 1] <= _TOLERANCE:
        return line[[0, -1]]
    first = _simplify(line[: farthest + 1])
    second = _simplify(line[farthest:])
    return np.concatenate([first[:-1], second])
