"""Move detections of tiles to their image, and make those of one object one detection."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.structures import Boxes, Instances
from torch import Tensor
from torchvision.ops import box_iou

_SAME_OBJECT = 0.5  # least IoU of two detections within what both tiles see
# a detection ends at the edge of its tile if it ends nearer than this fraction of its side
_CUT = 0.05

Window = tuple[slice, slice]  # rows, columns
Pair = tuple[float, int, int]  # IoU and indices of two detections


def in_image(instances: Instances, window: Window, size: tuple[int, int]) -> Instances:
    """Move the detections of a tile to their place in the image."""
    top = window[0].start
    left = window[1].start
    boxes = instances.pred_boxes.tensor
    moved = Instances(size)
    moved.scores = instances.scores
    moved.pred_classes = instances.pred_classes
    moved.pred_boxes = Boxes(boxes + torch.tensor([left, top, left, top]))

    if instances.has("pred_keypoints"):
        moved.pred_keypoints = instances.pred_keypoints + torch.tensor([left, top, 0])
    if instances.has("pred_masks"):
        masks = instances.pred_masks.numpy()
        moved.pred_masks_rle = [_rle(mask, top, left, size) for mask in masks]
    return moved


def _rle(
    mask: np.ndarray, top: int, left: int, size: tuple[int, int]
) -> dict[str, Any]:
    """Encode the mask of a window, whose corner is (top, left), as one of an image of ``size``.

    Only the columns of the object are looked at: most of a large image is empty.
    """
    height, width = size
    columns = np.flatnonzero(mask.any(axis=0))
    if not columns.size:
        return mask_util.encode(np.zeros(size, np.uint8, order="F"))

    first = columns[0]
    covered = mask[:, first : columns[-1] + 1]
    bottom = top + len(mask)
    strip = np.zeros((height, covered.shape[1]), bool)
    strip[top:bottom] = covered

    # COCO counts runs of equal pixels, column by column
    changes = np.diff(strip.ravel("F"), prepend=False, append=False)
    edges = np.flatnonzero(changes) + (left + first) * height
    counts = np.diff(edges, prepend=0, append=height * width)
    rle = {"size": [height, width], "counts": counts.tolist()}
    return mask_util.frPyObjects(rle, height, width)


def merged(tiles: Sequence[Instances], windows: Sequence[Window]) -> Instances:
    """Merge the detections of an object, the highest score first.

    They become the most certain one that is not cut by its tile, or else their union.
    """
    found = Instances.cat(list(tiles))
    counts = torch.tensor([len(tile) for tile in tiles])
    tile_of = torch.repeat_interleave(counts)
    views = torch.tensor([_corners(window) for window in windows])
    is_cut = _cut(found, views[tile_of]).tolist()
    scores = found.scores.tolist()

    pairs = _agreeing_pairs(found, counts.tolist(), windows, views)
    objects = []
    for members in _groups(pairs, tile_of.tolist()):
        best = max(members, key=lambda index: (not is_cut[index], scores[index]))
        instance = found[best]
        instance.scores = found.scores[members].max()[None]
        if is_cut[best]:
            _unite(instance, [found[index] for index in members])
        objects.append(instance)

    objects.sort(key=lambda instance: -instance.scores)
    return Instances.cat(objects) if objects else found


def _corners(window: Window) -> list[float]:
    rows, columns = window
    return [columns.start, rows.start, columns.stop, rows.stop]


def _unite(instance: Instances, pieces: list[Instances]) -> None:
    """Give a detection the union of the boxes and masks of its pieces."""
    union = Instances.cat(pieces)
    boxes = union.pred_boxes.tensor
    first = boxes[:, :2].amin(0)
    last = boxes[:, 2:].amax(0)
    instance.pred_boxes = Boxes(torch.cat([first, last])[None])
    if union.has("pred_masks_rle"):
        instance.pred_masks_rle = [mask_util.merge(union.pred_masks_rle)]


def _cut(found: Instances, views: Tensor) -> Tensor:
    """Return which boxes end at an edge of their tile inside the image."""
    height, width = found.image_size
    boxes = found.pred_boxes.tensor
    sides = boxes[:, 2:] - boxes[:, :2]
    near = (_CUT * sides).clamp_min(1).repeat(1, 2)
    is_at_edge = (boxes - views).abs() < near
    is_inside = views != torch.tensor([0, 0, width, height])
    return (is_at_edge & is_inside).any(1)


def _agreeing_pairs(
    found: Instances, counts: Sequence[int], windows: Sequence[Window], views: Tensor
) -> Iterator[Pair]:
    """Yield detections of two tiles that agree within what both see.

    A detection is inside its own tile, so that it is clipped to the other one only.
    """
    boxes = found.pred_boxes.tensor.split(counts)
    classes = found.pred_classes.split(counts)
    starts = np.cumsum([0, *counts]).tolist()

    for one, two in _neighbors(windows):
        first = _clipped(boxes[one], views[two])
        second = _clipped(boxes[two], views[one])
        iou = box_iou(first, second)
        is_same_class = classes[one][:, None] == classes[two]
        is_same = is_same_class & (iou >= _SAME_OBJECT)
        for row, column in is_same.nonzero().tolist():
            overlap = float(iou[row, column])
            yield overlap, starts[one] + row, starts[two] + column


def _neighbors(windows: Sequence[Window]) -> Iterator[tuple[int, int]]:
    """Yield the indices of tiles that overlap; tiles are sorted by their rows."""
    for one, first in enumerate(windows):
        for two in range(one + 1, len(windows)):
            rows, columns = windows[two]
            if rows.start >= first[0].stop:
                break
            if columns.start < first[1].stop and first[1].start < columns.stop:
                yield one, two


def _clipped(boxes: Tensor, view: Tensor) -> Tensor:
    """Clip boxes, (N, 4), to the corners of a tile, (4)."""
    low, high = view.view(2, 2)
    corners = boxes.view(-1, 2, 2)
    return corners.clamp(low, high).flatten(1)


def _groups(pairs: Iterable[Pair], tile_of: Sequence[int]) -> list[list[int]]:
    """Group the detections of one object, from the surest pair on.

    All of a group are of different tiles, which find an object once.
    """
    group_of = [[index] for index in range(len(tile_of))]
    for _, first, second in sorted(pairs, reverse=True):
        one = group_of[first]
        two = group_of[second]
        tiles_of_one = {tile_of[index] for index in one}
        tiles_of_two = {tile_of[index] for index in two}
        if tiles_of_one & tiles_of_two:
            continue

        both = one + two
        for index in both:
            group_of[index] = both

    unique = {id(group): group for group in group_of}
    return list(unique.values())
