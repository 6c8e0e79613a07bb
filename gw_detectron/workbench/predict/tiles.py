"""Prediction on large images, tile by tile, with the statistics of the whole image."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import torch
from detectron2.structures import Boxes, Instances
from torch import Tensor
from torchvision.ops import box_iou

from ...errors import ConfigError
from ...layers import ImageStatistics
from ..console import progress_bar
from .open_predictor import Predictor

STATISTICS = ("image", "tile")
_SAME_OBJECT = 0.5  # least IoU of two detections within what both tiles see
_WINDOW = (
    1600  # side of what is seen at once to gather statistics, in pixels of the model's input
)
_LARGEST_WINDOW = 4000  # the same, in pixels of the image
_CUT = 0.05  # a detection ends at the edge of its tile if it ends nearer than this fraction of its side

Window = tuple[slice, slice]  # rows, columns


class TiledPredictor:
    """Detect objects in an image of any size, tile by tile.

    Tiles overlap. An object that is smaller than the overlap is whole in one of them; of a larger one each tile can
    find a piece. Detections of different tiles that agree within what both see become one. An image that fits into one
    tile is predicted as without tiles.

    GW and GN compute their statistics from each tile, so tiles are normalized differently. With
    ``statistics="image"`` a first pass, at the scale of the tiles, gathers the statistics of the image in windows that
    do not overlap; a second one predicts with them, see :class:`gw_detectron.layers.ImageStatistics`. A model without
    such norms needs no first pass.

    Args:
        predictor: from :func:`~gw_detectron.workbench.predict.open_predictor`. It resizes a tile as it would an image.
        tile, overlap: side of a tile, and least overlap of neighbors, in pixels of the image.
        statistics: ``"image"`` or ``"tile"``.
    """

    def __init__(
        self,
        predictor: Predictor,
        tile: int = 1024,
        overlap: int = 128,
        statistics: str = "image",
    ) -> None:
        if tile < 1:
            raise ConfigError(
                f"tiles ({tile}): not positive. Fix: give the side in pixels, e.g. 1024."
            )
        if not 0 <= overlap < tile:
            raise ConfigError(
                f"overlap ({overlap}): not from 0 to {tile - 1}. Fix: give fewer pixels than a tile has."
            )
        if statistics not in STATISTICS:
            raise ConfigError(
                f"statistics ({statistics!r}): unknown. Fix: give one of {list(STATISTICS)}."
            )
        self.predictor, self.tile, self.overlap, self.statistics = (
            predictor,
            tile,
            overlap,
            statistics,
        )
        self.metadata, self.cfg = predictor.metadata, predictor.cfg

    def __call__(self, image: Any) -> Instances:
        """Detect objects in an array, (H, W, 3) RGB uint8, or :func:`gw_detectron.workbench.images.reading.open_image`.

        The result is as the predictor's, the highest score first. With several tiles the masks are
        ``pred_masks_rle``, COCO's RLE of the image: (N, H, W) pixels would not fit into memory.
        """
        windows = self.windows(image)
        if len(windows) == 1:
            return self.predictor(image[:, :])
        statistics = self.measure(image)
        tiles = []
        for window in progress_bar(windows, desc="tiles", unit="tile", leave=False):
            with statistics.apply():
                tiles.append(_in_image(self.predictor(image[window]), window, image.shape))
        return _merged(tiles, windows)

    def windows(self, image: Any) -> list[Window]:
        """Return the rows and columns of the tiles, spread evenly."""
        rows, columns = (_parts(size, self.tile, self.overlap) for size in image.shape[:2])
        return list(itertools.product(rows, columns))

    def measure(self, image: Any) -> ImageStatistics:
        """Gather the statistics of an image."""
        if self.statistics == "tile":
            return ImageStatistics([])
        model: Any = self.predictor.model
        images = (
            module for name, module in model.named_modules() if not name.startswith("roi_heads")
        )
        statistics = ImageStatistics(images)  # of modules whose samples are images, not regions
        if not statistics.layers:
            return statistics
        in_backbone = set(model.backbone.modules()).issuperset(
            statistics.layers
        )  # then the rest can wait
        tile = self.predictor.input(image[: self.tile, : self.tile])
        scale = max(tile["image"].shape[1:]) / max(tile["height"], tile["width"])
        windows = self.measured_windows(image, scale)
        for window in progress_bar(windows, desc="statistics", unit="window", leave=False):
            inputs = [
                {"image": self.predictor.input(image[window], scale)["image"]}
            ]  # no size: results stay small
            with torch.no_grad(), statistics.gather():
                model.backbone(model.preprocess_image(inputs).tensor) if in_backbone else model(
                    inputs
                )
        return statistics

    def measured_windows(self, image: Any, scale: float) -> list[Window]:
        """Return the windows whose statistics are gathered, in random order; scale: input pixels per image pixel."""
        largest = max(self.tile, min(round(_WINDOW / scale), _LARGEST_WINDOW))
        sides = (
            math.ceil(size / math.ceil(size / largest)) for size in image.shape[:2]
        )  # about equal ones
        rows, columns = (
            _parts(size, side, 0) for size, side in zip(image.shape[:2], sides, strict=True)
        )
        windows = list(itertools.product(rows, columns))
        return [windows[index] for index in np.random.default_rng(0).permutation(len(windows))]


def _parts(size: int, tile: int, overlap: int) -> list[slice]:
    count = max(1, math.ceil((size - overlap) / (tile - overlap)))
    starts = np.linspace(0, max(0, size - tile), count).astype(int).tolist()
    return [slice(start, min(start + tile, size)) for start in starts]


def _in_image(found: Instances, window: Window, shape: Sequence[int]) -> Instances:
    """Move the detections of a tile to their place in the image."""
    top, left = window[0].start, window[1].start
    moved = Instances(
        (shape[0], shape[1]), scores=found.scores, pred_classes=found.pred_classes
    )
    moved.pred_boxes = Boxes(found.pred_boxes.tensor + torch.tensor([left, top, left, top]))
    if found.has("pred_keypoints"):
        moved.pred_keypoints = found.pred_keypoints + torch.tensor([left, top, 0])
    if found.has("pred_masks"):
        moved.pred_masks_rle = [
            _rle(mask, top, left, shape) for mask in found.pred_masks.numpy()
        ]
    return moved


def _rle(mask: np.ndarray, top: int, left: int, shape: Sequence[int]) -> dict[str, Any]:
    """Encode a mask that lies in an image, without making the image."""
    height, width = shape[:2]
    changes = np.diff(np.pad(mask.T.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (columns, starts), (_, stops) = np.nonzero(changes == 1), np.nonzero(changes == -1)
    offsets = (columns + left) * height + top
    begins, ends = starts + offsets, stops + offsets
    apart = begins[1:] != ends[:-1]  # RLE of pycocotools has no runs of length 0
    begins, ends = (
        begins[np.r_[True, apart][: len(begins)]],
        ends[np.r_[apart, True][: len(ends)]],
    )
    edges = np.r_[0, np.stack([begins, ends], 1).ravel(), height * width]
    return mask_util.frPyObjects(
        {"size": [height, width], "counts": np.diff(edges).tolist()}, height, width
    )


def _merged(tiles: Sequence[Instances], windows: Sequence[Window]) -> Instances:
    """Merge the detections of an object into the most certain one that is not cut by its tile, or into their union."""
    found = Instances.cat(list(tiles))
    boxes, scores = found.pred_boxes.tensor, found.scores.tolist()
    views = torch.tensor(
        [[w.start, h.start, w.stop, h.stop] for h, w in windows], dtype=boxes.dtype
    )
    tile_of = torch.arange(len(tiles)).repeat_interleave(
        torch.tensor([len(tile) for tile in tiles])
    )
    cut = _cut(boxes, views[tile_of], found.image_size)
    objects = []
    for members in _objects(boxes, found.pred_classes, tile_of, views):
        members.sort(key=lambda index: (bool(cut[index]), -scores[index]))
        best = found[members[0]]
        best.scores = found.scores[members].max()[None]
        if cut[members[0]]:
            pieces = boxes[members]
            best.pred_boxes = Boxes(
                torch.cat([pieces[:, :2].amin(0), pieces[:, 2:].amax(0)])[None]
            )
            if found.has("pred_masks_rle"):
                best.pred_masks_rle = [
                    mask_util.merge([found.pred_masks_rle[index] for index in members])
                ]
        objects.append(best)
    objects.sort(key=lambda each: -float(each.scores))
    return Instances.cat(objects) if objects else found


def _cut(boxes: Tensor, views: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Return which boxes end at an edge of their tile inside the image."""
    near = (_CUT * (boxes[:, 2:] - boxes[:, :2])).clamp_min(1)
    size = boxes.new_tensor(image_size[::-1])
    first = (boxes[:, :2] - views[:, :2] < near) & (views[:, :2] > 0)
    last = (views[:, 2:] - boxes[:, 2:] < near) & (views[:, 2:] < size)
    return (first | last).any(1)


def _objects(boxes: Tensor, classes: Tensor, tile_of: Tensor, views: Tensor) -> list[list[int]]:
    """Group the detections of one object: they agree within what both tiles see, and are of different tiles."""
    pairs = []
    used, counts = tile_of.unique(return_counts=True)  # tiles with detections
    views, members = views[used], tile_of.argsort(stable=True).split(counts.tolist())
    for one, first in enumerate(members):
        low, high = (
            torch.maximum(views[one], views)[:, :2],
            torch.minimum(views[one], views)[:, 2:],
        )
        for two in (low < high).all(1)[one + 1 :].nonzero()[:, 0].add(one + 1).tolist():
            second = members[two]
            seen = [
                boxes[which].view(-1, 2, 2).clamp(low[two], high[two]).flatten(1)
                for which in (first, second)
            ]
            iou = box_iou(*seen) * (classes[first][:, None] == classes[second])
            for row, column in (iou >= _SAME_OBJECT).nonzero().tolist():
                pairs.append((float(iou[row, column]), int(first[row]), int(second[column])))
    groups = {index: [index] for index in range(len(boxes))}
    tiles = tile_of.tolist()
    for _, *pair in sorted(pairs, reverse=True):
        group, other = (groups[index] for index in pair)
        if group is not other and {tiles[index] for index in group}.isdisjoint(
            tiles[index] for index in other
        ):
            groups |= dict.fromkeys(group + other, group + other)
    return list({id(group): group for group in groups.values()}.values())


def shrunk(image: Any, found: Instances, longest: int = 4096) -> tuple[np.ndarray, Instances]:
    """Return an image and its detections at most ``longest`` pixels large; masks in RLE of larger ones are left out."""
    height, width = found.image_size
    step = math.ceil(max(height, width) / longest)
    small = image[::step, ::step]
    result = Instances(small.shape[:2], scores=found.scores, pred_classes=found.pred_classes)
    result.pred_boxes = Boxes(found.pred_boxes.tensor / step)
    if found.has("pred_keypoints"):
        result.pred_keypoints = found.pred_keypoints / torch.tensor([step, step, 1])
    if found.has("pred_masks"):
        result.pred_masks = found.pred_masks[:, ::step, ::step]
    if found.has("pred_masks_rle") and step == 1:
        result.pred_masks = found.pred_masks_rle
    return small, result
