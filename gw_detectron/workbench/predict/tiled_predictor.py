"""Prediction on large images, tile by tile, with the statistics of the whole image."""

import itertools
import math
from collections.abc import Iterable, Sequence
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
from .predictor import Predictor

STATISTICS = ("image", "tile")
_SAME_OBJECT = 0.5  # least IoU of two detections within what both tiles see
# side of what is seen at once to gather statistics, in pixels of the model's input and of the image
_WINDOW = 1600
_LARGEST_WINDOW = 4000
# a detection ends at the edge of its tile if it ends nearer than this fraction of its side
_CUT = 0.05

Window = tuple[slice, slice]  # rows, columns


class TiledPredictor:
    """Detect objects in an image of any size, tile by tile.

    Tiles overlap. An object that is smaller than the overlap is whole in one of them; of a larger
    one each tile can find a piece. Detections of different tiles that agree within what both see
    become one. An image that fits into one tile is predicted as without tiles.

    GW and GN compute their statistics from each tile, so tiles are normalized differently. With
    ``statistics="image"`` a first pass, at the scale of the tiles, gathers the statistics of the
    image in windows that do not overlap; a second one predicts with them, see
    :class:`gw_detectron.layers.ImageStatistics`. A model without such norms needs no first pass.

    Args:
        predictor: from :func:`~gw_detectron.workbench.predict.open_predictor`. It resizes a tile as
            it would an image.
        tile: side of a tile, in pixels of the image.
        overlap: least overlap of neighbors, in pixels of the image.
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
                f"overlap ({overlap}): not from 0 to {tile - 1}. Fix: give fewer pixels than a "
                "tile has."
            )
        if statistics not in STATISTICS:
            raise ConfigError(
                f"statistics ({statistics!r}): unknown. Fix: give one of {list(STATISTICS)}."
            )

        self.predictor = predictor
        self.tile = tile
        self.overlap = overlap
        self.statistics = statistics
        self.metadata = predictor.metadata
        self.cfg = predictor.cfg

    def __call__(self, image: Any) -> Instances:
        """Detect objects in an image.

        ``image`` is an array, (H, W, 3) RGB uint8, or of
        :func:`~gw_detectron.workbench.images.open_image`. The result is as the predictor's, the
        highest score first. With several tiles the masks are ``pred_masks_rle``, COCO's RLE of
        the image: (N, H, W) pixels would not fit into memory.
        """
        windows = self.windows(image)
        if len(windows) == 1:
            return self.predictor(image[:, :])

        statistics = self.measure(image)
        tiles = []
        for window in progress_bar(windows, desc="tiles", unit="tile", leave=False):
            with statistics.apply():
                instances = self.predictor(image[window])
            tiles.append(_in_image(instances, window, image.shape[:2]))
        return _merged(tiles, windows)

    def windows(self, image: Any) -> list[Window]:
        """Return the rows and columns of the tiles, spread evenly."""
        height, width = image.shape[:2]
        rows = _parts(height, self.tile, self.overlap)
        columns = _parts(width, self.tile, self.overlap)
        return list(itertools.product(rows, columns))

    def measure(self, image: Any) -> ImageStatistics:
        """Gather the statistics of an image."""
        if self.statistics == "tile":
            return ImageStatistics([])

        model: Any = self.predictor.model
        statistics = ImageStatistics(_modules_of_images(model))
        if not statistics.layers:
            return statistics

        # without layers in heads, these can wait
        is_backbone_enough = set(model.backbone.modules()).issuperset(statistics.layers)
        tile = image[: self.tile, : self.tile]
        resized = self.predictor.input(tile)["image"]
        scale = max(resized.shape[1:]) / max(tile.shape[:2])
        windows = self.measured_windows(image, scale)
        for window in progress_bar(
            windows, desc="statistics", unit="window", leave=False
        ):
            pixels = self.predictor.input(image[window], scale)["image"]
            inputs = [{"image": pixels}]  # no size: results stay small
            with torch.no_grad(), statistics.gather():
                if is_backbone_enough:
                    model.backbone(model.preprocess_image(inputs).tensor)
                else:
                    model(inputs)
        return statistics

    def measured_windows(self, image: Any, scale: float) -> list[Window]:
        """Return the windows whose statistics are gathered, in random order.

        ``scale``: input pixels per image pixel.
        """
        largest = max(self.tile, min(round(_WINDOW / scale), _LARGEST_WINDOW))
        rows, columns = (_equal_parts(size, largest) for size in image.shape[:2])
        windows = list(itertools.product(rows, columns))
        np.random.default_rng(0).shuffle(windows)
        return windows


def _modules_of_images(model: torch.nn.Module) -> Iterable[torch.nn.Module]:
    """Yield the modules whose samples are images, not regions."""
    for name, module in model.named_modules():
        if not name.startswith("roi_heads"):
            yield module


def _parts(size: int, tile: int, overlap: int) -> list[slice]:
    if size <= tile:
        return [slice(0, size)]
    count = math.ceil((size - overlap) / (tile - overlap))
    starts = np.linspace(0, size - tile, count).astype(int).tolist()
    return [slice(start, start + tile) for start in starts]


def _equal_parts(size: int, largest: int) -> list[slice]:
    count = math.ceil(size / largest)
    return _parts(size, math.ceil(size / count), 0)


def _in_image(instances: Instances, window: Window, size: tuple[int, int]) -> Instances:
    """Move the detections of a tile to their place in the image."""
    top, left = window[0].start, window[1].start
    moved = Instances(
        size, scores=instances.scores, pred_classes=instances.pred_classes
    )
    boxes = instances.pred_boxes.tensor
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
    """Encode a mask that lies in an image, from the columns that it covers alone."""
    height, width = size
    columns = np.flatnonzero(mask.any(axis=0))
    first, last = 0, 0
    if columns.size:
        first, last = columns[0], columns[-1] + 1
    bottom = top + len(mask)
    strip = np.zeros((height, last - first), bool)
    strip[top:bottom] = mask[:, first:last]

    # COCO counts runs of equal pixels, column by column
    changes = np.diff(strip.ravel("F"), prepend=False, append=False)
    edges = np.flatnonzero(changes) + (left + first) * height
    counts = np.diff(edges, prepend=0, append=height * width)
    rle = {"size": [height, width], "counts": counts.tolist()}
    return mask_util.frPyObjects(rle, height, width)


def _merged(tiles: list[Instances], windows: Sequence[Window]) -> Instances:
    """Merge the detections of an object, the highest score first.

    They become the most certain one that is not cut by its tile, or else their union.
    """
    found = Instances.cat(tiles)
    boxes = found.pred_boxes.tensor
    corners = [[x.start, y.start, x.stop, y.stop] for y, x in windows]
    views = torch.tensor(corners, dtype=boxes.dtype)
    counts = torch.tensor([len(tile) for tile in tiles])
    tile_of = torch.repeat_interleave(counts)
    scores = found.scores.tolist()
    is_cut = _cut(boxes, views[tile_of], found.image_size).tolist()

    objects = []
    pairs = _agreeing_pairs(boxes, found.pred_classes, tile_of, views)
    for members in _groups(pairs, tile_of.tolist()):
        best = max(members, key=lambda index: (not is_cut[index], scores[index]))
        instance = found[best]
        instance.scores = found.scores[members].max()[None]
        if is_cut[best]:
            _unite(instance, [found[index] for index in members])
        objects.append(instance)

    objects.sort(key=lambda instance: -instance.scores)
    return Instances.cat(objects) if objects else found


def _unite(instance: Instances, pieces: list[Instances]) -> None:
    """Give a detection the union of the boxes and masks of its pieces."""
    union = Instances.cat(pieces)
    boxes = union.pred_boxes.tensor
    first = boxes[:, :2].amin(0)
    last = boxes[:, 2:].amax(0)
    instance.pred_boxes = Boxes(torch.cat([first, last])[None])
    if union.has("pred_masks_rle"):
        instance.pred_masks_rle = [mask_util.merge(union.pred_masks_rle)]


def _cut(boxes: Tensor, views: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Return which boxes end at an edge of their tile inside the image."""
    sides = boxes[:, 2:] - boxes[:, :2]
    near = (_CUT * sides).clamp_min(1).repeat(1, 2)
    borders = boxes.new_tensor([0, 0, *image_size[::-1]])
    is_at_edge = (boxes - views).abs() < near
    return (is_at_edge & (views != borders)).any(1)


def _agreeing_pairs(
    boxes: Tensor, classes: Tensor, tile_of: Tensor, views: Tensor
) -> list[tuple[float, int, int]]:
    """Find detections of two tiles that agree within what both see: IoU and indices."""
    first, last = views[:, :2], views[:, 2:]
    low = torch.maximum(first[:, None], first)
    high = torch.minimum(last[:, None], last)
    are_neighbors = (low < high).all(2).triu(1)
    tiles = [(tile_of == tile).nonzero()[:, 0] for tile in range(len(views))]

    pairs: list[tuple[float, int, int]] = []
    for one, two in are_neighbors.nonzero().tolist():
        members = [tiles[one], tiles[two]]
        seen = []
        for indices in members:
            corners = boxes[indices].view(-1, 2, 2)
            seen.append(corners.clamp(low[one, two], high[one, two]).flatten(1))

        iou = box_iou(*seen)
        iou *= classes[members[0], None] == classes[members[1]]
        rows, columns = (iou >= _SAME_OBJECT).nonzero(as_tuple=True)
        found = (iou[rows, columns], members[0][rows], members[1][columns])
        pairs += zip(*(values.tolist() for values in found), strict=True)
    return pairs


def _groups(
    pairs: Iterable[tuple[float, int, int]], tile_of: Sequence[int]
) -> list[list[int]]:
    """Group the detections of one object, the surest pairs first; all are of different tiles."""
    group_of = [[index] for index in range(len(tile_of))]
    for _, first, second in sorted(pairs, reverse=True):
        one, two = group_of[first], group_of[second]
        tiles = {tile_of[index] for index in one}
        if tiles.isdisjoint(tile_of[index] for index in two):
            one += two
            for index in two:
                group_of[index] = one
    return [group for index, group in enumerate(group_of) if group[0] == index]


def shrunk(
    image: Any, instances: Instances, longest: int = 4096
) -> tuple[np.ndarray, Instances]:
    """Shrink an image and its detections to ``longest`` pixels; RLE of larger ones is left out."""
    step = math.ceil(max(instances.image_size) / longest)
    small = image[::step, ::step]
    result = Instances(
        small.shape[:2], scores=instances.scores, pred_classes=instances.pred_classes
    )
    result.pred_boxes = Boxes(instances.pred_boxes.tensor / step)
    if instances.has("pred_keypoints"):
        result.pred_keypoints = instances.pred_keypoints / torch.tensor([step, step, 1])
    if instances.has("pred_masks"):
        result.pred_masks = instances.pred_masks[:, ::step, ::step]
    if instances.has("pred_masks_rle") and step == 1:
        result.pred_masks = instances.pred_masks_rle
    return small, result
