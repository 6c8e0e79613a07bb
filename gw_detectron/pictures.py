"""Draw objects on an image: predictions and ground truth, with one color for each class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
from detectron2.data import Metadata
from detectron2.structures import BoxMode, Instances
from detectron2.utils.colormap import colormap

from .installation import require_packages

SMALLEST_SIDE = 480  # longer side of a drawing in pixels: smaller images are enlarged
SMALLEST_FONT = 16  # of labels, in pixels of the drawing
FONT_SHARE = 1 / 45  # font size of labels by the longer side, in large drawings


def plain_text(text: str) -> str:
    """Return text that matplotlib draws as it is; between two dollar signs it would expect a formula."""
    return text.replace("$", r"\$")


def class_colors(metadata: Metadata) -> np.ndarray:
    """Return the color of each class.

    Args:
        metadata: of a dataset. Its ``thing_colors`` are taken, or else the 70 colors of Detectron2's color map in turn.

    Returns:
        (classes, 3) RGB, each from 0 to 1.
    """
    given = metadata.get("thing_colors", None)
    if given is not None:
        return np.asarray(given) / 255
    colors = np.array(list(dict.fromkeys(map(tuple, colormap(rgb=True, maximum=1)))))  # it has some of them twice
    return colors[np.arange(len(metadata.get("thing_classes", colors))) % len(colors)]


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
        classes: index of each object's class.
        boxes: (N, 4) x0, y0, x1, y1 in pixels.
        scores: of each object, 0 to 1.
        notes: text of each object, after its score.
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
    labels = [names[index] if names is not None else str(index) for index in classes]
    if scores is not None:
        labels = [f"{label} {score:.0%}" for label, score in zip(labels, scores, strict=True)]
    if notes is not None:
        labels = [f"{label} {note}" for label, note in zip(labels, notes, strict=True)]
    labels = [plain_text(label) for label in labels]
    if masks is not None:
        masks = [_as_rle(mask) if isinstance(mask, np.ndarray) else mask for mask in masks]
    colors = class_colors(metadata)
    drawing = Visualizer(image, metadata, scale=max(1.0, SMALLEST_SIDE / max(image.shape[:2])))
    own_colors = list(colors[np.asarray(classes, dtype=int) % len(colors)])
    drawing.overlay_instances(boxes=boxes, masks=masks, keypoints=keypoints, assigned_colors=own_colors)
    _draw_labels(drawing, labels, own_colors, boxes)
    return drawing.get_output().get_image()


def _draw_labels(drawing: Any, labels: Sequence[str], colors: Sequence[np.ndarray], boxes: np.ndarray) -> None:
    """Draw each label in the upper left corner of its box, below the labels that are already there.

    Detectron2's own labels are smaller for smaller objects, cover each other, and leave the image at its borders.

    Args:
        drawing: Detectron2's ``Visualizer``.
        labels: as matplotlib takes them.
        colors: RGB of each label's frame.
        boxes: (N, 4) x0, y0, x1, y1 in pixels of the image.
    """
    output = drawing.output
    width, height = output.width, output.height
    font = max(SMALLEST_FONT / output.scale, FONT_SHARE * max(width, height))
    row = 1.3 * font
    placed = np.zeros((0, 3))  # left, right and top of labels, in pixels of the image
    for label, color, (left, top) in zip(labels, colors, boxes[:, :2], strict=True):
        drawing.draw_text(label, (0, 0), color="w", font_size=font * 72 / output.fig.dpi, horizontal_alignment="left")
        text = output.ax.texts[-1]
        text.get_bbox_patch().set(edgecolor=color, linewidth=1)
        length = text.get_window_extent(output.canvas.get_renderer()).width / output.scale
        left = np.clip(left, 0, max(0, width - length))
        top = np.clip(top, 0, max(0, height - row))
        tops = placed[(placed[:, 0] < left + length) & (left < placed[:, 1]), 2]
        below = top
        while (near := np.abs(tops - below) < 0.99 * row).any():
            below = tops[near].max() + row
        if below + row <= height:  # or else there is no room: it covers a label
            top = below
        text.set_position((left, top))
        placed = np.vstack([placed, [left, left + length, top]])


def _as_rle(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask: Detectron2 refuses to draw an array of two columns."""
    return mask_util.encode(np.asfortranarray(mask, dtype=np.uint8))


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


def draw_record(image: np.ndarray, metadata: Metadata, record: dict, *, keypoints: bool = False) -> np.ndarray:
    """Draw the annotations of a record in Detectron2's dataset format, with keypoints on request."""
    objects = record.get("annotations", [])
    boxes = [BoxMode.convert(entry["bbox"], entry["bbox_mode"], BoxMode.XYXY_ABS) for entry in objects]
    masks = [entry.get("segmentation") for entry in objects]
    return draw_objects(
        image,
        metadata,
        [entry["category_id"] for entry in objects],
        np.asarray(boxes, dtype=float).reshape(-1, 4),
        masks=masks if all(masks) else None,
        keypoints=keypoints_of(objects) if keypoints else None,
    )


def keypoints_of(objects: Sequence[dict[str, Any]]) -> np.ndarray | None:
    """Return the keypoints of annotations or results in COCO's format, (N, K, 3); None unless all have them."""
    points = [each.get("keypoints") for each in objects]
    return None if not points or None in points else np.asarray(points, dtype=float).reshape(len(points), -1, 3)
