"""Prediction on large images, tile by tile, with the statistics of the whole image."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from detectron2.structures import Instances

from ...errors import ConfigError
from ...layers import ImageStatistics
from ..console import progress_bar
from ..images import evaluation_sides
from .predictor import Predictor
from .tile_merging import Window, in_image, merged

STATISTICS = ("image", "tile")
# side of what is seen at once to gather statistics, in pixels of the model's input and of the image
_WINDOW = 1600
_LARGEST_WINDOW = 4000


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
        self.image_scale = predictor.image_scale
        #: whether a tile of the last image has as many objects as the model gives
        self.is_full = False

    def __call__(self, image: Any) -> Instances:
        """Detect objects in an image.

        ``image`` is an array, (H, W, 3) RGB uint8, or of
        :func:`~gw_detectron.workbench.images.open_image`. The result is as the predictor's, the
        highest score first. With several tiles the masks are ``pred_masks_rle``, COCO's RLE of
        the image: (N, H, W) pixels would not fit into memory.
        """
        windows = self.windows(image)
        if len(windows) == 1:
            instances = self.predictor(image[:, :])
            self.is_full = self.predictor.is_full
            return instances

        statistics = self.measure(image)
        tiles = []
        self.is_full = False
        for window in progress_bar(windows, desc="tiles", unit="tile", leave=False):
            with statistics.apply():
                instances = self.predictor(image[window])
            self.is_full |= self.predictor.is_full
            tiles.append(in_image(instances, window, image.shape[:2]))
        return merged(tiles, windows)

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
        scale = self._scale(image)
        windows = self.measured_windows(image, scale)
        bar = progress_bar(windows, desc="statistics", unit="window", leave=False)
        for window in bar:
            pixels = self.predictor.input(image[window], scale)["image"]
            inputs = [{"image": pixels}]  # no size: results stay small
            with torch.no_grad(), statistics.gather():
                if is_backbone_enough:
                    model.backbone(model.preprocess_image(inputs).tensor)
                else:
                    model(inputs)
        return statistics

    def _scale(self, image: Any) -> float:
        """Return the input pixels of the model per pixel of a tile."""
        height = min(self.tile, image.shape[0])
        width = min(self.tile, image.shape[1])
        resized = evaluation_sides(height, width, self.cfg)
        return max(resized) / max(height, width)

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
