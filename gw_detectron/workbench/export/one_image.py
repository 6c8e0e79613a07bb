"""Exportable detector of one image of any size, which it resizes as evaluation does."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Instances
from torch import Tensor, nn
from torch.export import Dim

from ...errors import ExportError
from .base import DetectorProgram, clip, rows_with_dummies, with_first_row
from .formats import random_pixels

MASK_THRESHOLD = 0.5  # of detector_postprocess
# runtimes compute exact halves, which are frequent, as slightly more or less
_ROUND = 0.5 + 2**-12


class OneImageProgram(nn.Module):
    """Resize one image as evaluation does, detect, and scale the detections back.

    Args:
        detector: the detector for padded batches.
        sides: ``INPUT.MIN_SIZE_TEST``, 0 for no resizing, and ``MAX_SIZE_TEST``.
        paste_masks: whether masks are binary and as large as the image.

    Shape: pixels of 0 to 255, (3, H, W) -> boxes (K, 4) in pixels of this image, scores (K),
    classes
    (K), masks (K, S, S), or pasted (count, H, W) bool, of a Mask R-CNN, and count ().
    """

    smallest_side = 2  # torch.export makes a constant of 1

    def __init__(
        self,
        detector: DetectorProgram,
        sides: tuple[int, int],
        paste_masks: bool = False,
    ) -> None:
        super().__init__()
        if paste_masks and "masks" not in detector.names:
            raise ExportError(
                "paste_masks (True): the detector has no masks. Fix: leave it out."
            )
        if sides[0] and min(sides) < detector.smallest_side:
            raise ExportError(
                f"INPUT.MIN_SIZE_TEST, MAX_SIZE_TEST ({sides}): with one_image, sides below "
                f"{detector.smallest_side} are padded more than in Detectron2, which changes the "
                "detections. Fix: export the batch form (no --one-image)."
            )

        self.detector = detector
        self.sides = sides
        self.paste_masks = paste_masks
        self.names = detector.names

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        size = _size(image)
        pixels = self.resize(image)
        resized = resized_sides(size, *self.sides)
        features = self._features(pixels[None], resized)

        outputs = self.detector.detect(features, resized[None])
        boxes, scores, classes, *masks, count = [output[0] for output in outputs]
        scale = (size / resized).flip(0).repeat(2)
        boxes = boxes * scale
        boxes = clip(boxes[None], size[None])[0]
        if self.paste_masks:
            rows = rows_with_dummies(classes >= 0)
            places = with_first_row(boxes)[rows]
            inside = with_first_row(masks[0])[rows]
            pasted = paste(inside, places, *image.shape[1:])
            masks = [pasted[2:]]
        return boxes, scores, classes, *masks, count

    def resize(self, image: Tensor) -> Tensor:
        """Resize pixels, (3, H, W), as PIL does.

        Columns come first, then rows; each result is rounded to whole numbers.
        """
        resized = resized_sides(_size(image), *self.sides)
        height, width = _sides(resized, self.smallest_side)
        image = image[None].round()
        for sides in ((image.shape[2], width), (height, width)):
            image = F.interpolate(image, sides, mode="bilinear", antialias=True)
            image = (image + _ROUND).floor().clamp(0, 255)
        return image[0]

    def _features(self, pixels: Tensor, size: Tensor) -> Mapping[str, Tensor]:
        """Compute feature maps of resized pixels.

        Of a long, narrow image, the shorter side may be too small without padding.
        """
        backbone = self.detector.model.backbone
        smallest = self.detector.smallest_side
        multiple = max(1, backbone.size_divisibility)
        padded = size.clamp(min=smallest) + multiple - 1
        counts = padded // multiple
        least = math.ceil(smallest / multiple)
        rows, columns = _sides(counts, least)

        bottom = rows * multiple - pixels.shape[2]
        right = columns * multiple - pixels.shape[3]
        normalized = self.detector.normalize(pixels)
        return backbone(F.pad(normalized, (0, right, 0, bottom)))

    def expected(self, image: Tensor, pixels: Tensor) -> Instances:
        """Detect in a resized image with Detectron2's own inference and postprocessing.

        Args:
            image: (3, H, W).
            pixels: the resized image.
        """
        (result,) = self.detector.expected([pixels])
        if result.has("pred_masks") and not self.paste_masks:
            result.masks = result.pred_masks  # a name that Detectron2 does not paste
            result.remove("pred_masks")

        result = detector_postprocess(result, *image.shape[1:])
        if result.has("masks"):
            result.pred_masks = result.masks
        return result

    def sample_inputs(self) -> dict[str, Tensor]:
        channels = len(self.detector.model.pixel_mean)
        return {"image": random_pixels(channels, 97, 131)}

    def dynamic_shapes(self) -> dict[str, Any]:
        side = Dim.DYNAMIC(min=self.smallest_side)
        return {"image": {1: side, 2: side}}

    def describe(self) -> dict[str, Any]:
        description = self.detector.describe()
        given = description["input"]
        given["name"] = "image"
        given["shape"] = given["shape"][1:]
        given["smallest_side"] = self.smallest_side
        return {**description, "masks_pasted": self.paste_masks}


class ResizeProgram(OneImageProgram):
    """The resized pixels alone, (3, H', W'), which runtimes round differently."""

    def __init__(self, detector: DetectorProgram, sides: tuple[int, int]) -> None:
        super().__init__(detector, sides)
        self.names = ["pixels"]

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return (self.resize(image),)


def resized_sides(size: Tensor, shorter: int, longest: int) -> Tensor:
    r"""Return the sides, (2), of an image of ``size``, (2), after ``ResizeShortestEdge``.

    .. math:: H' = \lfloor sH + 1/2 \rfloor,
        \quad s = \min(\mathrm{shorter} / \min(H, W), \mathrm{longest} / \max(H, W))

    In integers, as runtimes round floats differently. Detectron2's floats round some ties of 1/2
    down.
    """
    if not shorter:
        return size.clamp(min=OneImageProgram.smallest_side)
    low, high = size.min(), size.max()
    by_shorter = _rounded_ratio(size * shorter, low)
    by_longest = _rounded_ratio(size * longest, high)
    resized = torch.minimum(by_shorter, by_longest)
    return resized.clamp(min=OneImageProgram.smallest_side)


def _rounded_ratio(a: Tensor, b: Tensor) -> Tensor:
    return (2 * a + b) // (2 * b)


def paste(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    r"""Paste masks, (M, S, S), into boxes, (M, 4), of an image; return (M, H, W) bool.

    Bilinear interpolation inside a box is a product of two small matrices with the mask:

    .. math:: A = Y M X^\top \ge 1/2, \quad Y_{ij} = \max(0, 1 - |v_i - j|),
        \quad v_i = S (i + 1/2 - y_0) / (y_1 - y_0) - 1/2

    Source: Detectron2's ``paste_masks_in_image``, which samples a grid of all pixels.
    """
    side = masks.shape[-1]
    cells = torch.arange(side, device=boxes.device)

    def weights(pixels: int, low: Tensor, high: Tensor) -> Tensor:
        centers = torch.arange(pixels, device=boxes.device) + 0.5
        side_lengths = (high - low)[:, None]
        shares = (centers - low[:, None]) / side_lengths
        places = shares[:, :, None] * side - 0.5
        distances = (places - cells).abs()
        return (1 - distances).clamp(min=0)

    x0, y0, x1, y1 = boxes.unbind(1)
    rows = weights(height, y0, y1)
    columns = weights(width, x0, x1)
    return rows @ masks @ columns.mT >= MASK_THRESHOLD


def _size(image: Tensor) -> Tensor:
    """Return height and width as a tensor, (2)."""
    sides = [torch.scalar_tensor(side, dtype=torch.int64) for side in image.shape[1:]]
    return torch.stack(sides)


def _sides(size: Tensor, least: int) -> list[int]:
    """Return a size as free symbols.

    As expressions of H and W, they would make a pt2 file load in minutes.
    """
    sides: list[Any] = size.tolist()
    for side in sides:
        torch._check(side >= least)
    return sides
