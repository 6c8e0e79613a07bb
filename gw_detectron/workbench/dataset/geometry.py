"""Compare masks, boxes and areas of COCO annotations, vectorized."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_MOST_PIXELS = 2**32  # pycocotools counts in 32 bits, and reads memory of others beyond
#: of a polygon, in pixels; the memory of pycocotools grows with it, and at 1e9 it crashes
_LARGEST_COORDINATE = 1e6


def is_coordinates(points: Any) -> bool:
    """Return whether points look like a flat list of numbers."""
    if not isinstance(points, list):
        return False
    return not points or isinstance(points[0], (int, float))


def is_polygon(points: Any) -> bool:
    """Return whether points, x0, y0, x1, y1, ..., make a polygon that Detectron2 keeps."""
    return is_coordinates(points) and len(points) >= 6 and len(points) % 2 == 0


def is_run_length(mask: Any, size: tuple[int, int]) -> bool:
    """Return whether a mask is an RLE of an image of ``size`` (height, width)."""
    if not isinstance(mask, dict) or mask.get("size") != [*size]:
        return False
    height, width = size
    counts = mask.get("counts")
    if min(size) < 1 or height * width >= _MOST_PIXELS:
        return False
    if isinstance(counts, str):
        counts = _decompressed(counts)
    elif not isinstance(counts, list) or not all(
        isinstance(count, (int, float)) for count in counts
    ):
        return False
    return bool(np.sum(counts) == height * width and np.min(counts) >= 0)


def _decompressed(text: str) -> NDArray[np.int64]:
    """Return the counts of a compressed RLE.

    A count has five bits per character, the lowest first, and a sixth that says whether another one follows. From the
    fourth count on, it is the difference to the one before the last.
    Source: rleFrString in pycocotools' maskApi.c, which checks nothing.
    """
    characters = text.encode(errors="replace")
    values = np.frombuffer(characters, np.uint8).astype(np.int64) - 48
    is_end = values & 32 == 0
    is_start = np.roll(is_end, 1)

    places = np.arange(len(values))
    shifts = 5 * (places - np.maximum.accumulate(places * is_start))
    counts = np.add.reduceat((values & 31) << shifts, np.flatnonzero(is_start))
    # the sign
    counts -= ((values & 16) << (shifts + 1))[is_end]
    for first in (1, 2):
        counts[first::2] = counts[first::2].cumsum()
    return counts


def compressed(mask: dict[str, Any]) -> Any:
    """Return a run-length encoding whose counts are compressed."""
    is_list = isinstance(mask["counts"], list)
    return mask_util.frPyObjects(mask, *mask["size"]) if is_list else mask


def mask_boxes(
    masks: Sequence[Any], sizes: Sequence[tuple[int, int]]
) -> tuple[Floats, Floats]:
    """Measure masks, polygons or RLE, of images of ``sizes`` (height, width).

    Returns:
        Boxes x0, y0, x1, y1, (N, 4), and areas, (N), in pixels; NaN without a polygon of possible pixels or valid RLE.
        An area of 0 is a mask without a pixel.
    """
    boxes = np.full((len(masks), 4), np.nan)
    areas = np.full(len(masks), np.nan)
    encoded = []
    for index, (mask, size) in enumerate(zip(masks, sizes, strict=True)):
        if isinstance(mask, list):
            polygons = list(filter(is_polygon, mask))
            if polygons:
                boxes[index], areas[index] = _measure_polygons(polygons)
        elif is_run_length(mask, size):
            encoded.append(index)

    if encoded:
        run_lengths = [compressed(masks[index]) for index in encoded]
        boxes[encoded] = corners(mask_util.toBbox(run_lengths))
        # pycocotools 2.0.11 cannot count more than 255 at once
        areas[encoded] = [mask_util.area(run_length) for run_length in run_lengths]
    is_huge = np.abs(boxes).max(axis=1) > _LARGEST_COORDINATE
    boxes[is_huge] = areas[is_huge] = np.nan
    return boxes, areas


def _measure_polygons(polygons: Sequence[list[float]]) -> tuple[list[float], float]:
    """Return the box x0, y0, x1, y1 and the area of polygons.

    The area of a polygon is half of ``|sum_i x_i y_(i+1) - x_(i+1) y_i|``.
    """
    area = 0.0
    for polygon in polygons:
        last_x, last_y = polygon[-2:]
        cross = 0.0
        for x, y in zip(polygon[::2], polygon[1::2], strict=True):
            cross += last_x * y - x * last_y
            last_x, last_y = x, y
        area += abs(cross) / 2

    columns = [x for polygon in polygons for x in polygon[::2]]
    rows = [y for polygon in polygons for y in polygon[1::2]]
    return [min(columns), min(rows), max(columns), max(rows)], area


def corners(boxes: Floats) -> Floats:
    """Return boxes x, y, width, height, (N, 4), as x0, y0, x1, y1."""
    low = boxes[:, :2]
    return np.hstack([low, low + boxes[:, 2:]])


def far_apart(boxes: Floats, masks: Floats, sizes: Floats) -> Flags:
    """Compare boxes with boxes of masks, both x0, y0, x1, y1, inside of images of ``sizes`` (height, width).

    An edge may differ by one pixel, as tools round, and by a quarter of the mask, as people draw.
    """
    limits = np.tile(sizes[:, ::-1], 2)
    visible = np.clip(boxes, 0, limits)
    distance = np.abs(visible - np.clip(masks, 0, limits)).max(axis=1)

    longest = (masks[:, 2:] - masks[:, :2]).max(axis=1)
    with np.errstate(invalid="ignore"):  # NaN: no mask
        return distance > 1 + longest / 4


def wrong_areas(given: Floats, boxes: Floats, masks: Floats) -> Flags:
    """Return which areas fit neither the mask, to a factor of 2, nor the box.

    Without a mask (NaN), an area may be smaller than the box, as a mask would be, to a limit.
    """
    with np.errstate(invalid="ignore"):
        like_mask = (given >= masks / 2 - 2) & (given <= 2 * masks + 2)
        below_box = given < 1.1 * boxes
        like_box = below_box & (given > 0.9 * boxes)
        is_tiny = (given <= boxes / 200) | ((given <= 1) & (boxes >= 4))

    fits = np.where(np.isnan(masks), below_box & ~is_tiny, like_mask | like_box)
    return (boxes > 0) & ~fits
