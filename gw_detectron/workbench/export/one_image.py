"""Exportable detector of one image of any size, which it resizes as evaluation does."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Instances
from torch import Tensor, nn
from torch.export import Dim

from ...errors import ExportError
from .base import DetectorProgram, clip, rows_with_dummies
from .formats import random_pixels

MASK_THRESHOLD = 0.5  # of detector_postprocess
_ROUND = (
    0.5 + 2**-12
)  # runtimes compute exact halves, which are frequent, as slightly more or less


class OneImageProgram(nn.Module):
    """Resize one image as evaluation does, detect, and scale the detections back.

    Args:
        detector: the detector for padded batches.
        sides: ``INPUT.MIN_SIZE_TEST``, 0 for no resizing, and ``MAX_SIZE_TEST``.
        paste_masks: whether masks are binary and as large as the image.
        resize_only: whether to return only the resized pixels, (3, H', W'), which runtimes round differently.

    Shape: pixels of 0 to 255, (3, H, W) -> boxes (K, 4) in pixels of this image, scores (K), classes (K), masks
    (K, S, S), or pasted (count, H, W) bool, of a Mask R-CNN, and count ().
    """

    smallest_side = 2  # torch.export makes a constant of 1

    def __init__(
        self,
        detector: DetectorProgram,
        sides: tuple[int, int],
        paste_masks: bool = False,
        resize_only: bool = False,
    ) -> None:
        super().__init__()
        if paste_masks and "masks" not in detector.names:
            raise ExportError(
                "paste_masks (True): the detector has no masks. Fix: leave it out."
            )
        if sides[0] and min(sides) < (smallest := detector.smallest_side):
            raise ExportError(
                f"INPUT.MIN_SIZE_TEST, MAX_SIZE_TEST ({sides}): with one_image, sides below {smallest} are padded more "
                "than in Detectron2, which changes the detections. Fix: export the batch form (no --one-image)."
            )
        self.detector, self.sides, self.paste_masks, self.resize_only = (
            detector,
            sides,
            paste_masks,
            resize_only,
        )
        self.names = ["pixels"] if resize_only else detector.names

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        size, pixels = _size(image), self.resize(image)
        if self.resize_only:
            return (pixels,)
        resized = resized_sides(size, *self.sides)
        features = self._features(pixels[None], resized)
        boxes, scores, classes, *masks, count = self.detector.detect(features, resized[None])
        boxes = clip(boxes * (size / resized).flip(0).repeat(2), size[None])
        outputs = [each[0] for each in (boxes, scores, classes, *masks, count)]
        if self.paste_masks:
            rows = rows_with_dummies(outputs[2] >= 0)
            found, inside = (
                F.pad(outputs[0], (0, 0, 1, 0))[rows],
                F.pad(outputs[3], (0, 0, 0, 0, 1, 0))[rows],
            )
            outputs[3] = paste(inside, found, *image.shape[1:])[2:]
        return tuple(outputs)

    def resize(self, image: Tensor) -> Tensor:
        """Resize pixels, (3, H, W), as PIL does: columns, then rows, each rounded to whole numbers."""
        height, width = _sides(resized_sides(_size(image), *self.sides), self.smallest_side)
        image = image[None].round()
        for sides in ((image.shape[2], width), (height, width)):
            image = F.interpolate(image, sides, mode="bilinear", antialias=True)
            image = (image + _ROUND).floor().clamp(0, 255)
        return image[0]

    def _features(self, pixels: Tensor, size: Tensor) -> Mapping[str, Tensor]:
        """Compute feature maps; of a long, narrow image, the shorter side may be too small without padding."""
        backbone, smallest = self.detector.model.backbone, self.detector.smallest_side
        multiple = max(1, backbone.size_divisibility)
        height, width = _sides(
            (size.clamp(min=smallest) + multiple - 1) // multiple, -(-smallest // multiple)
        )
        padding = (
            0,
            width * multiple - pixels.shape[3],
            0,
            height * multiple - pixels.shape[2],
        )
        return backbone(F.pad(self.detector.normalize(pixels), padding))

    def expected(self, image: Tensor, pixels: Tensor) -> Instances:
        """Detect in an image, (3, H, W), resized to ``pixels``, with Detectron2's own inference and postprocessing."""
        (result,) = self.detector.expected([pixels])
        if result.has("pred_masks") and not self.paste_masks:
            result.masks = result.pred_masks  # a name that Detectron2 does not paste
            result.remove("pred_masks")
        result = detector_postprocess(result, *image.shape[1:])
        if result.has("masks"):
            result.pred_masks = result.masks
        return result

    def sample_inputs(self) -> dict[str, Tensor]:
        return {"image": random_pixels(len(self.detector.model.pixel_mean), 97, 131)}

    def dynamic_shapes(self) -> dict[str, Any]:
        side = Dim.DYNAMIC(min=self.smallest_side)
        return {"image": {1: side, 2: side}}

    def describe(self) -> dict[str, Any]:
        entries = self.detector.describe()
        shape = {
            "name": "image",
            "shape": entries["input"]["shape"][1:],
            "smallest_side": self.smallest_side,
        }
        return {**entries, "input": entries["input"] | shape, "masks_pasted": self.paste_masks}


def resized_sides(size: Tensor, shorter: int, longest: int) -> Tensor:
    r"""Return the sides, (2), to which Detectron2's ``ResizeShortestEdge`` resizes an image of ``size``, (2).

    .. math:: H' = \lfloor sH + 1/2 \rfloor,
        \quad s = \min(\mathrm{shorter} / \min(H, W), \mathrm{longest} / \max(H, W))

    In integers, as runtimes round floats differently. Detectron2's floats round some ties of 1/2 down.
    """
    if not shorter:
        return size.clamp(min=OneImageProgram.smallest_side)
    low, high = size.min(), size.max()
    resized = torch.minimum(
        (2 * size * shorter + low) // (2 * low), (2 * size * longest + high) // (2 * high)
    )
    return resized.clamp(min=OneImageProgram.smallest_side)


def paste(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    r"""Paste masks, (M, S, S), into boxes, (M, 4), of an image; return (M, H, W) bool.

    Bilinear interpolation inside a box is a product of two small matrices with the mask:

    .. math:: A = Y M X^\top \ge 1/2, \quad Y_{ij} = \max(0, 1 - |v_i - j|),
        \quad v_i = S (i + 1/2 - y_0) / (y_1 - y_0) - 1/2

    Source: Detectron2's ``paste_masks_in_image``, which samples a grid of all pixels.
    """
    side = masks.shape[-1]

    def weights(pixels: int, low: Tensor, high: Tensor) -> Tensor:
        centers = (torch.arange(pixels, device=boxes.device) + 0.5 - low[:, None]) / (
            high - low
        )[:, None]
        cells = torch.arange(side, device=boxes.device)
        return (1 - (centers[:, :, None] * side - 0.5 - cells).abs()).clamp(min=0)

    rows, columns = (
        weights(height, boxes[:, 1], boxes[:, 3]),
        weights(width, boxes[:, 0], boxes[:, 2]),
    )
    return rows @ masks @ columns.mT >= MASK_THRESHOLD


def _size(image: Tensor) -> Tensor:
    """Return height and width as a tensor, (2)."""
    return torch.stack(
        [torch.scalar_tensor(side, dtype=torch.int64) for side in image.shape[1:]]
    )


def _sides(size: Tensor, least: int) -> list[int]:
    """Return a size as free symbols: as expressions of H and W, they would make a pt2 file load in minutes."""
    sides: list[Any] = size.tolist()
    for side in sides:
        torch._check(side >= least)
    return sides
