"""Base of exportable detectors: post-processing rewritten with fixed-size tensors.

N: images, M: boxes of an image, K: selected boxes. A score of -inf marks a row without a box.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.modeling import GeneralizedRCNN
from detectron2.structures import Instances
from torch import Tensor, nn
from torch.export import Dim
from torchvision.ops import nms

from ...errors import ExportError
from ...layers import use_backend
from .backbone import Normalization
from .formats import random_pixels

NO_BOX = -math.inf


class DetectorProgram(nn.Module):
    """Copy of a detector as a function of tensors, in evaluation mode, on the CPU, in float32.

    The modules of the model compute features, logits and deltas. Between them, Detectron2 handles lists of varying
    length; this class has tensors with a fixed number of rows.

    Args:
        model: the detector; it is copied and not changed. See :func:`.detector_program` for what is supported.
        classes: names by category id, in the order of the outputs, for the description; None if unknown.

    Shape: images (N, 3, H, W), pixels of 0 to 255, and sizes (N, 2) int64, heights and widths of the images inside ->
    boxes (N, K, 4), scores (N, K), classes (N, K), masks (N, K, S, S) of a Mask R-CNN, and count (N), where K is
    ``TEST.DETECTIONS_PER_IMAGE``. Detections come first, by descending score; the other rows are zeros of class -1. An
    impossible size is an error in pt2; ONNX has no assertions: its image has count -1.
    """

    #: score above which a box is a detection; a buffer, so that a loaded pt2 program can change it
    score_threshold: Tensor
    #: attribute of ``head``: largest number of detections
    max_detections_attr: str

    def __init__(self, model: nn.Module, classes: Mapping[int, str] | None = None) -> None:
        super().__init__()
        copied: Any = copy.deepcopy(model)
        self.model: Any = copied.cpu().float().eval().requires_grad_(False)
        #: K
        self.detections: int = getattr(self.head, self.max_detections_attr)
        if self.detections < 1:
            raise ExportError(
                f"TEST.DETECTIONS_PER_IMAGE ({self.detections}): not positive. Fix: set it, e.g. to 100."
            )
        if classes and len(classes) != (number := self.head.num_classes):
            raise ExportError(
                f"classes ({len(classes)} given): the model has {number} classes. Fix: give one each."
            )
        self.classes = classes or {}
        masks = (
            ["masks"] if getattr(getattr(model, "roi_heads", None), "mask_on", False) else []
        )
        #: names of the outputs
        self.names = ["boxes", "scores", "classes", *masks, "count"]
        #: smallest height and width of a torch.export program, where every feature map is larger than 1 x 1
        self.smallest_side = (
            max(shape.stride for shape in self.model.backbone.output_shape().values()) + 1
        )
        self.register_buffer("score_threshold", torch.tensor(self.head.test_score_thresh))

    @property
    def head(self) -> Any:
        """The part of the model that selects the detections."""
        raise NotImplementedError

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        height, width = images.shape[-2:]
        possible = (sizes > 0).all(1) & (sizes[:, 0] <= height) & (sizes[:, 1] <= width)
        if hasattr(
            torch, "_assert_async"
        ):  # raises a RuntimeError also inside an exported program; not in ONNX
            message = (
                "sizes: not positive, or outside of images. Fix: give sizes inside the tensor."
            )
            torch._assert_async(possible.all(), message)
        sizes = torch.where(possible[:, None], sizes, 0)  # nothing is found in 0 x 0 pixels
        rows = torch.arange(height)[:, None] < sizes[:, 0, None, None]
        columns = torch.arange(width) < sizes[:, 1, None, None]
        images = torch.where((rows & columns)[:, None], self.normalize(images), 0)
        multiple = max(1, self.model.backbone.size_divisibility)
        bottom, right = (
            (side + multiple - 1) // multiple * multiple - side for side in (height, width)
        )
        *detections, count = self.detect(
            self.model.backbone(F.pad(images, (0, right, 0, bottom))), sizes
        )
        return *detections, torch.where(possible, count, -1)

    def detect(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from feature maps."""
        raise NotImplementedError

    def select(
        self, boxes: Tensor, scores: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Select K detections of each image from M rows; drop empty boxes, as Detectron2 does at the end."""
        scores, index = top(scores, self.detections)
        boxes = take(boxes, index)
        scores = torch.where((boxes[:, :, 2:] > boxes[:, :, :2]).all(2), scores, NO_BOX)
        scores, order = top(scores, self.detections)
        found = scores > NO_BOX
        boxes = torch.where(found[:, :, None], take(boxes, order), 0)
        classes = torch.where(found, classes.gather(1, index.gather(1, order)), -1)
        return boxes, torch.where(found, scores, 0), classes, found.sum(1)

    def normalize(self, pixels: Tensor) -> Tensor:
        return (pixels - self.model.pixel_mean) / self.model.pixel_std

    def expected(self, images: Sequence[Tensor]) -> list[Instances]:
        """Detect in images, (3, H, W), with Detectron2's own inference, on the exported backend."""
        inputs = [{"image": image} for image in images]
        with torch.no_grad(), use_backend("reference"):
            if isinstance(self.model, GeneralizedRCNN):
                results = self.model.inference(inputs, do_postprocess=False)
                # of Detectron2's postprocessing, which would also paste the masks: drop empty boxes
                return [result[result.pred_boxes.nonempty()] for result in results]
            return [result["instances"] for result in self.model(inputs)]

    def sample_inputs(self) -> dict[str, Tensor]:
        """Draw inputs for the export."""
        side = self.smallest_side
        images = random_pixels(2, len(self.model.pixel_mean), side + 95, side + 31)
        return {"images": images, "sizes": torch.tensor([[side + 95, side], [side, side + 31]])}

    def dynamic_shapes(self) -> dict[str, Any]:
        """Return the free dimensions of the inputs, for torch.export."""
        batch, side = Dim.DYNAMIC(min=1), Dim.DYNAMIC(min=self.smallest_side)
        return {"images": {0: batch, 2: side, 3: side}, "sizes": {0: batch}}

    def describe(self) -> dict[str, Any]:
        """Describe inputs and outputs as plain values, for metadata and reports."""
        mean, std = (
            tuple(values.flatten().tolist())
            for values in (self.model.pixel_mean, self.model.pixel_std)
        )
        normalization = Normalization(self.model.input_format, mean, std, inside=True)
        return {
            "input": normalization.describe(
                "images", ["N", len(mean), "H", "W"], 1, self.smallest_side
            ),
            "outputs": self.names,
            "detections": self.detections,
            "score_threshold": self.head.test_score_thresh,
            "class_names": list(self.classes.values()) or None,
            "category_ids": list(self.classes) or None,
        }


def clip(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Clip boxes, (N, M, 4), to images of heights and widths ``sizes``, (N, 2)."""
    limits = sizes.flip(1).repeat(1, 2)[:, None].to(boxes.dtype)
    return torch.minimum(boxes.clamp(min=0), limits)


def take(values: Tensor, index: Tensor) -> Tensor:
    """Take rows of every image: (N, M, D) and (N, K) -> (N, K, D)."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the K highest scores of every image, (N, M), in descending order; also return their indices below M.

    Where M is smaller than K, scores of -inf are appended.
    """
    selected, index = F.pad(scores, (0, count), value=NO_BOX).topk(count)
    return selected, index.clamp(max=scores.shape[1] - 1)


def suppress(
    boxes: Tensor, scores: Tensor, groups: Tensor, num_groups: int, threshold: float
) -> Tensor:
    r"""Apply NMS inside every image and group; return the scores with -inf for suppressed boxes.

    One call of NMS handles all images and groups: each pair has a cell of its own on a grid. :math:`\sqrt{G}` columns
    keep coordinates small: float32 rounds those of 80 classes of 1333 px in one row to 0.008 px, here to 0.001 px.

    Args:
        boxes: finite, (N, M, 4).
        scores: (N, M), -inf for rows without a box.
        groups: class or feature level, 0 to G - 1, (N, M) or (M).
        num_groups: G.
        threshold: of the IoU.
    """
    columns = math.ceil(math.sqrt(num_groups))
    images = torch.arange(boxes.shape[0], device=boxes.device)[:, None]
    x, y = torch.broadcast_tensors(groups % columns, images * columns + groups // columns)
    cell = boxes.max() - boxes.min() + 1
    apart = (boxes + cell * torch.stack((x, y, x, y), 2)).flatten(0, 1)
    # torch.export assumes at least two kept boxes: row 0 is a box of score -inf, taken twice
    flat = F.pad(scores.flatten(), (1, 0), value=NO_BOX)
    candidates = rows_with_dummies(scores > NO_BOX)
    kept = candidates[nms(F.pad(apart, (0, 0, 1, 0))[candidates], flat[candidates], threshold)]
    return torch.full_like(flat, NO_BOX).index_put((kept,), flat[kept])[1:].view_as(scores)


def rows_with_dummies(mask: Tensor) -> Tensor:
    """Return 0, 0 and the indices of true values, counted from 1: torch.export assumes at least two rows."""
    return F.pad(F.pad(mask.flatten(), (1, 0), value=True).nonzero()[:, 0], (1, 0))
