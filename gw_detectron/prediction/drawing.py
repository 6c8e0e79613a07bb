"""Draw predictions and ground truth on an image, with one color for each class."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from detectron2.data import Metadata
from detectron2.structures import BoxMode, Instances
from detectron2.utils.colormap import colormap
from matplotlib import rc_context

from ..installation import require_packages

_SMALLEST_SIDE = 480  # longer side of a drawing in pixels: smaller images are enlarged
_SMALLEST_FONT = 12  # of labels, in points


def class_colors(metadata: Metadata, classes: Iterable[int]) -> list[np.ndarray]:
    """Return the RGB color, 0 to 1, of each class: the dataset's ``thing_colors``, default: Detectron2's in turn."""
    given = metadata.get("thing_colors", None)
    colors = colormap(rgb=True, maximum=1) if given is None else np.asarray(given) / 255
    return [colors[index % len(colors)] for index in classes]


def draw_objects(
    image: np.ndarray,
    metadata: Metadata,
    classes: Sequence[int],
    boxes: np.ndarray,
    *,
    scores: Sequence[float] | None = None,
    notes: Sequence[str] | None = None,
    masks: Sequence[Any] | np.ndarray | None = None,
    keypoints: np.ndarray | None = None,
) -> np.ndarray:
    """Draw boxes, class names, scores, masks and keypoints on an image.

    Args:
        image: (H, W, 3) RGB, 0 to 255.
        metadata: of the dataset, for names and colors.
        classes, scores, notes: class index, score and further text of each object.
        boxes: (N, 4) x0, y0, x1, y1 in pixels.
        masks: of each object: (H, W) bool, polygons or RLE.
        keypoints: (N, K, 3) x, y, visibility.

    Returns:
        (H', W', 3) uint8 RGB. The longer side is at least 480.

    Raises:
        MissingPackageError: OpenCV is not installed.
    """
    require_packages("pictures", "cv2")
    from detectron2.utils.visualizer import Visualizer  # which imports OpenCV

    names = metadata.get("thing_classes", None)
    labels = [str(index) if names is None else names[index] for index in classes]
    for texts in ([f"{score:.0%}" for score in scores] if scores is not None else None, notes):
        if texts is not None:
            labels = [f"{label} {text}" for label, text in zip(labels, texts, strict=True)]
    scale = max(1.0, _SMALLEST_SIDE / max(image.shape[:2]))
    drawing = Visualizer(image, metadata, scale=scale)
    drawing._default_font_size = max(drawing._default_font_size, _SMALLEST_FONT / scale)  # it rounds down, up to 0
    colors = class_colors(metadata, classes)
    with rc_context({"text.parse_math": False}):  # class names may have dollar signs
        drawing.overlay_instances(boxes=boxes, labels=labels, masks=masks, keypoints=keypoints, assigned_colors=colors)
    return drawing.get_output().get_image()


def draw_predictions(image: np.ndarray, metadata: Metadata, instances: Instances) -> np.ndarray:
    """Draw the ``Instances`` that a detector returns, on the CPU."""
    return draw_objects(
        image,
        metadata,
        instances.pred_classes.tolist(),
        instances.pred_boxes.tensor.numpy(),
        scores=instances.scores.tolist(),
        masks=instances.pred_masks.numpy() if instances.has("pred_masks") else None,
        keypoints=instances.pred_keypoints.numpy() if instances.has("pred_keypoints") else None,
    )


def draw_record(image: np.ndarray, metadata: Metadata, record: dict) -> np.ndarray:
    """Draw the annotations of a record in Detectron2's dataset format."""
    objects = record.get("annotations", [])
    boxes = [BoxMode.convert(entry["bbox"], entry["bbox_mode"], BoxMode.XYXY_ABS) for entry in objects]
    masks = [entry.get("segmentation") for entry in objects]
    return draw_objects(
        image,
        metadata,
        [entry["category_id"] for entry in objects],
        np.asarray(boxes, dtype=float).reshape(-1, 4),
        masks=masks if all(masks) else None,
    )


def keypoints_of(objects: Sequence[dict[str, Any]]) -> np.ndarray | None:
    """Return the keypoints of annotations or results in COCO's format, (N, K, 3); None unless all have them."""
    points = [each.get("keypoints") for each in objects]
    return None if not points or None in points else np.asarray(points, dtype=float).reshape(len(points), -1, 3)
