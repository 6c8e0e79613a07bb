"""Draw predictions and ground truth on an image."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from detectron2.data import Metadata
from detectron2.structures import BoxMode, Instances
from detectron2.utils.colormap import colormap
from matplotlib import rc_context
from matplotlib.colors import hsv_to_rgb
from torch import Tensor

from ...installation import require_packages
from .class_names import class_labels

_SMALLEST_SIDE = 480  # longer side of a drawing in pixels: smaller images are enlarged
_SMALLEST_FONT = 12  # of labels, in points
_ALPHA = 0.35  # opacity of masks, inside their contours
_HUE_STEP = (math.sqrt(5) - 1) / 2  # golden ratio of the circle, 222.5 degrees


def object_colors(
    metadata: Metadata, classes: Sequence[int], *, instances: bool
) -> list[Any]:
    """Return the RGB color, 0 to 1, of each object.

    Objects of a class share the dataset's ``thing_colors``, or unless ``instances`` Detectron2's
    color of the class. The hues of instances are 222.5 degrees apart, so that neighbors differ.
    """
    given = metadata.get("thing_colors", None)
    if given is not None:
        colors = np.asarray(given) / 255
    elif instances:
        hues = np.arange(len(classes)) * _HUE_STEP % 1
        return [hsv_to_rgb((hue, 0.9, 1)) for hue in hues]
    else:
        colors = colormap(rgb=True, maximum=1)
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
    """Draw contours or boxes, labels and keypoints on an image.

    Instances differ in color if they have masks, or if there is one class, whose name is then left
    out. Labels that would hide other objects or labels are left out.

    Args:
        image: (H, W, 3) RGB, 0 to 255.
        metadata: of the dataset, with ``thing_classes``.
        classes: class index of each object.
        boxes: (N, 4) x0, y0, x1, y1 in pixels.
        scores, notes: score and further text of each object.
        masks: of each object: (H, W) bool, polygons or RLE.
        keypoints: (N, K, 3) x, y, visibility.

    Returns:
        (H', W', 3) uint8 RGB. The longer side is at least 480.
    """
    require_packages("pictures", "cv2")
    from detectron2.utils.visualizer import Visualizer  # which imports OpenCV

    class Contours(Visualizer):
        def draw_box(self, *args: Any, **kwargs: Any) -> Any:
            """Draw boxes of objects without masks only."""
            return super().draw_box(*args, **kwargs) if masks is None else self.output

    names = metadata.get("thing_classes", None)
    labels = class_labels(tuple(names or ()))
    is_single = names is not None and len(names) == 1
    scale = max(1.0, _SMALLEST_SIDE / max(image.shape[:2]))
    drawing = Contours(image, metadata, scale=scale)
    # which rounds it down, up to 0
    drawing._default_font_size = max(drawing._default_font_size, _SMALLEST_FONT / scale)

    # class names may have dollar signs
    with rc_context({"text.parse_math": False, "font.sans-serif": [labels.font]}):
        drawing.overlay_instances(
            boxes=boxes,
            labels=_labels(labels.names, classes, scores, notes),
            masks=masks,
            keypoints=keypoints,
            assigned_colors=object_colors(
                metadata, classes, instances=is_single or masks is not None
            ),
            alpha=_ALPHA,
        )
        _hide_labels(drawing.output, boxes, notes or [""] * len(classes))
    return drawing.get_output().get_image()


def _labels(
    names: Sequence[str],
    classes: Sequence[int],
    scores: Sequence[float] | None,
    notes: Sequence[str] | None,
) -> list[str]:
    """Write class, score and note of each object; the name of the only class is left out."""
    columns: list[Sequence[str]] = [[""] * len(classes)]
    if not names:
        columns.append([str(index) for index in classes])
    elif len(names) > 1:
        columns.append([names[index] for index in classes])
    if scores is not None:
        columns.append([f"{score:.0%}" for score in scores])
    if notes is not None:
        columns.append(notes)

    return [" ".join(words).strip() for words in zip(*columns, strict=True)]


def _hide_labels(output: Any, boxes: np.ndarray, notes: Sequence[str]) -> None:
    """Hide labels that cover a label or, outside their own box, the box of another object.

    Labels with a note come first, then those of larger objects.
    """
    sides = boxes[:, 2:] - boxes[:, :2]
    order = np.argsort(-np.prod(sides, axis=1))  # in which Detectron2 draws
    labels = list(zip(order, output.ax.texts, strict=False))
    labels.sort(key=lambda label: not notes[label[0]])

    shown = np.empty((0, 4))
    for index, text in labels:
        place = _move_inside(text, output)
        beyond = (place - boxes[index]) * (-1, -1, 1, 1)
        is_inside = beyond.max() <= 2  # pixels
        others = shown
        if not is_inside:
            others = np.vstack([shown, np.delete(boxes, index, axis=0)])

        overlaps = (others[:, :2] < place[2:]) & (others[:, 2:] > place[:2])
        is_hidden = overlaps.all(axis=1).any()
        text.set_visible(not is_hidden)
        if not is_hidden:
            shown = np.vstack([shown, place])


def _move_inside(text: Any, output: Any) -> np.ndarray:
    """Move a label up and to the left until it is in the picture; return its box, (4)."""
    to_image = output.ax.transData.inverted()
    extent = text.get_window_extent(output.canvas.get_renderer())
    x0, y1, x1, y0 = to_image.transform_bbox(extent).extents

    shift = np.minimum(0, [output.width - x1, output.height - y1])
    text.set_position(np.add(text.get_position(), shift))
    return np.array([x0, y0, x1, y1]) + np.tile(shift, 2)


def draw_predictions(
    image: np.ndarray, metadata: Metadata, instances: Instances
) -> np.ndarray:
    """Draw the ``Instances`` of a detector, on the CPU; ``pred_masks`` may also be RLE."""
    fields = instances.get_fields()
    masks = fields.get("pred_masks")
    keypoints = fields.get("pred_keypoints")
    return draw_objects(
        image,
        metadata,
        instances.pred_classes.tolist(),
        instances.pred_boxes.tensor.numpy(),
        scores=instances.scores.tolist(),
        masks=masks.numpy() if isinstance(masks, Tensor) else masks,
        keypoints=None if keypoints is None else keypoints.numpy(),
    )


def draw_record(
    image: np.ndarray,
    metadata: Metadata,
    record: dict,
    notes: Sequence[str] | None = None,
) -> np.ndarray:
    """Draw the annotations of a record of Detectron2; they may have a ``score``.

    Masks, keypoints or scores that some of them lack are left out.
    """
    objects = record.get("annotations", [])
    boxes = [
        BoxMode.convert(
            annotation["bbox"],
            annotation.get("bbox_mode", BoxMode.XYWH_ABS),
            BoxMode.XYXY_ABS,
        )
        for annotation in objects
    ]

    points = _of_all(objects, "keypoints")
    keypoints = None
    if points is not None:
        keypoints = np.array(points, dtype=float).reshape(len(points), -1, 3)
    return draw_objects(
        image,
        metadata,
        [annotation["category_id"] for annotation in objects],
        np.array(boxes, dtype=float).reshape(-1, 4),
        notes=notes,
        scores=_of_all(objects, "score"),
        masks=_of_all(objects, "segmentation"),
        keypoints=keypoints,
    )


def _of_all(objects: Sequence[dict], key: str) -> list[Any] | None:
    """Return a field of all objects, None if one of them lacks it or there are none."""
    values = [annotation.get(key) for annotation in objects]
    is_complete = all(value is not None and value != [] for value in values)
    return values if values and is_complete else None
