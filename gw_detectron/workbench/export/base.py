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
from ...weights import Preprocessing
from .formats import check_channels, describe_images, random_pixels

NO_BOX = -math.inf


class DetectorProgram(nn.Module):
    """Copy of a detector as a function of tensors, in evaluation mode, on the CPU, in float32.

    The modules of the model compute features, logits and deltas. Between them, Detectron2 handles
    lists of varying length; this class has tensors with a fixed number of rows.

    Args:
        model: the detector; it is copied and not changed. See :func:`.detector_program` for what
            is supported.
        classes: names by category id, in the order of the outputs, for the description; None if
            unknown.

    Shape: images (N, 3, H, W), pixels of 0 to 255, and sizes (N, 2) int64, heights and widths of
    the images inside -> boxes (N, K, 4), scores (N, K), classes (N, K), masks (N, K, S, S) of a
    Mask R-CNN, and count (N), where K is ``TEST.DETECTIONS_PER_IMAGE``. Detections come first, by
    descending score; the other rows are zeros of class -1. An impossible size is an error in pt2;
    ONNX has no assertions: its image has count -1.
    """

    #: score above which a box is a detection; a buffer, so that a loaded pt2 program can change it
    score_threshold: Tensor
    #: attribute of ``head``: largest number of detections
    max_detections_attr: str

    def __init__(
        self, model: nn.Module, classes: Mapping[int, str] | None = None
    ) -> None:
        super().__init__()
        copied: Any = copy.deepcopy(model)
        self.model: Any = copied.cpu().float().eval().requires_grad_(False)
        self.classes = classes or {}
        #: K
        self.detections: int = getattr(self.head, self.max_detections_attr)
        if self.detections < 1:
            raise ExportError(
                f"TEST.DETECTIONS_PER_IMAGE ({self.detections}): not positive. Fix: set it, e.g. "
                "to 100."
            )
        if len(self.classes) not in (0, self.head.num_classes):
            raise ExportError(
                f"classes ({len(self.classes)} given): the model has {self.head.num_classes} "
                "classes. Fix: give one each."
            )

        mean = self.model.pixel_mean.flatten().tolist()
        std = self.model.pixel_std.flatten().tolist()
        self.preprocessing = Preprocessing(self.model.input_format, mean, std, False)
        check_channels(self.preprocessing)
        #: names of the outputs
        self.names = ["boxes", "scores", "classes", "count"]
        #: smallest height and width of a torch.export program, where every feature map is larger
        #: than 1 x 1
        strides = [
            shape.stride for shape in self.model.backbone.output_shape().values()
        ]
        self.smallest_side = max(strides) + 1
        self.register_buffer(
            "score_threshold", torch.tensor(self.head.test_score_thresh)
        )

    @property
    def head(self) -> Any:
        """The part of the model that selects the detections."""
        raise NotImplementedError

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        height, width = images.shape[-2:]
        heights, widths = sizes.unbind(1)
        fits = (heights <= height) & (widths <= width)
        is_possible = (sizes > 0).all(1) & fits
        # a RuntimeError also inside an exported program; not in ONNX
        torch._assert_async(
            is_possible.all(),
            "sizes: not positive, or outside of images. Fix: give sizes inside the tensor.",
        )
        # nothing is found in 0 x 0 pixels
        sizes = torch.where(is_possible[:, None], sizes, 0)

        heights, widths = sizes[:, :, None, None, None].unbind(1)
        rows = torch.arange(height)[:, None]
        columns = torch.arange(width)
        is_inside = (rows < heights) & (columns < widths)
        images = torch.where(is_inside, self.normalize(images), 0)

        multiple = max(1, self.model.backbone.size_divisibility)
        padded_height = (height + multiple - 1) // multiple * multiple
        padded_width = (width + multiple - 1) // multiple * multiple
        padding = (0, padded_width - width, 0, padded_height - height)
        padded = F.pad(images, padding)
        features = self.model.backbone(padded)
        *detections, count = self.detect(features, sizes)
        return *detections, torch.where(is_possible, count, -1)

    def detect(
        self, features: Mapping[str, Tensor], sizes: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the outputs from feature maps."""
        raise NotImplementedError

    def select(
        self, boxes: Tensor, scores: Tensor, classes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Select K detections of each image from M rows.

        Empty boxes are dropped at the end, as in Detectron2.
        """
        scores, index = top(scores, self.detections)
        boxes = take(boxes, index)
        classes = classes.gather(1, index)

        is_empty = (box_sides(boxes) <= 0).any(2)
        scores = scores.masked_fill(is_empty, NO_BOX)
        scores, order = top(scores, self.detections)
        is_none = scores == NO_BOX
        return (
            take(boxes, order).masked_fill(is_none[:, :, None], 0),
            scores.masked_fill(is_none, 0),
            classes.gather(1, order).masked_fill(is_none, -1),
            (~is_none).sum(1),
        )

    def normalize(self, pixels: Tensor) -> Tensor:
        return (pixels - self.model.pixel_mean) / self.model.pixel_std

    def expected(self, images: Sequence[Tensor]) -> list[Instances]:
        """Detect in images, (3, H, W), with Detectron2's own inference, on the exported backend."""
        inputs = [{"image": image} for image in images]
        with torch.no_grad(), use_backend("reference"):
            if not isinstance(self.model, GeneralizedRCNN):
                return [result["instances"] for result in self.model(inputs)]
            results = self.model.inference(inputs, do_postprocess=False)
        # of Detectron2's postprocessing, which would also paste the masks: drop empty boxes
        return [result[result.pred_boxes.nonempty()] for result in results]

    def sample_inputs(self) -> dict[str, Tensor]:
        """Draw inputs for the export."""
        side = self.smallest_side
        height, width = side + 95, side + 31
        return {
            "images": random_pixels(2, len(self.model.pixel_mean), height, width),
            "sizes": torch.tensor([[height, side], [side, width]]),
        }

    def dynamic_shapes(self) -> dict[str, Any]:
        """Return the free dimensions of the inputs, for torch.export."""
        batch = Dim.DYNAMIC(min=1)
        side = Dim.DYNAMIC(min=self.smallest_side)
        return {
            "images": {0: batch, 2: side, 3: side},
            "sizes": {0: batch},
        }

    def describe(self) -> dict[str, Any]:
        """Describe inputs and outputs as plain values, for metadata and reports."""
        return {
            "input": describe_images(
                self.preprocessing,
                multiple_of=1,
                smallest_side=self.smallest_side,
            ),
            "outputs": self.names,
            "detections": self.detections,
            "score_threshold": self.head.test_score_thresh,
            "class_names": list(self.classes.values()) or None,
            "category_ids": list(self.classes) or None,
        }


def box_sides(boxes: Tensor) -> Tensor:
    """Return widths and heights of boxes, (..., 4) -> (..., 2)."""
    return boxes[..., 2:] - boxes[..., :2]


def clip(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Clip boxes, (N, M, 4), to images of heights and widths ``sizes``, (N, 2)."""
    widths_and_heights = sizes.flip(1).to(boxes)
    limits = widths_and_heights.repeat(1, 2)[:, None]
    return torch.minimum(boxes.clamp(min=0), limits)


def finite_only(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Replace boxes, (N, M, 4), and scores that are not finite by rows without a box."""
    is_finite = boxes.isfinite().all(2) & scores.isfinite()
    boxes = boxes.masked_fill(~is_finite[:, :, None], 0)
    return boxes, scores.masked_fill(~is_finite, NO_BOX)


def take(values: Tensor, index: Tensor) -> Tensor:
    """Take rows of every image: (N, M, D) and (N, K) -> (N, K, D)."""
    columns = values.shape[2]
    indices = index[:, :, None].expand(-1, -1, columns)
    return values.gather(1, indices)


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the K highest scores of every image, (N, M), in descending order.

    Their indices below M are returned, too. Where M is smaller than K, scores of -inf are appended.
    """
    padded = F.pad(scores, (0, count), value=NO_BOX)
    selected, index = padded.topk(count)
    last = scores.shape[1] - 1
    return selected, index.clamp(max=last)


def suppress(
    boxes: Tensor, scores: Tensor, groups: Tensor, num_groups: int, threshold: float
) -> Tensor:
    r"""Apply NMS inside every image and group; return the scores with -inf for suppressed boxes.

    One call of NMS handles all images and groups: each pair has a cell of its own on a grid.
    :math:`\sqrt{G}` columns
    keep coordinates small: float32 rounds those of 80 classes of 1333 px in one row to 0.008 px,
    here to 0.001 px.

    Args:
        boxes: finite, (N, M, 4).
        scores: (N, M), -inf for rows without a box.
        groups: class or feature level, 0 to G - 1, (N, M) or (M).
        num_groups: G.
        threshold: of the IoU.
    """
    columns = math.ceil(math.sqrt(num_groups))
    images = torch.arange(boxes.shape[0], device=boxes.device)
    x = (groups % columns).expand_as(scores)
    y = (groups // columns).add(columns * images[:, None])
    cell = boxes.max() - boxes.min() + 1
    corners = torch.stack((x, y, x, y), 2)
    apart = boxes + cell * corners

    # torch.export assumes at least two kept boxes: row 0 is a box of score -inf, taken twice
    rows = rows_with_dummies(scores > NO_BOX)
    flat_boxes = with_first_row(apart.flatten(0, 1))
    flat_scores = with_first_row(scores.flatten(), NO_BOX)
    order = nms(flat_boxes[rows], flat_scores[rows], threshold)
    kept = rows[order]

    result = torch.full_like(flat_scores, NO_BOX)
    result = result.index_put((kept,), flat_scores[kept])
    return result[1:].view_as(scores)


def rows_with_dummies(mask: Tensor) -> Tensor:
    """Return 0, 0 and the indices of true values, counted from 1.

    torch.export assumes at least two rows.
    """
    is_taken = with_first_row(mask.flatten(), True)
    indices = is_taken.nonzero()[:, 0]
    return F.pad(indices, (1, 0))


def with_first_row(values: Tensor, value: float = 0) -> Tensor:
    """Put a row of one value before others."""
    others = (0, 0) * (values.dim() - 1)
    return F.pad(values, (*others, 1, 0), value=value)
