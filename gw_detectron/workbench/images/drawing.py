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

_SMALLEST_SIDE = 480  # longer side of a drawing in pixels: smaller images are enlarged
_SMALLEST_FONT = 12  # of labels, in points
_ALPHA = 0.35  # opacity of masks, inside their contours


def object_colors(metadata: Metadata, classes: Sequence[int], *, instances: bool) -> list[Any]:
    """Return the RGB color, 0 to 1, of each object.

    Objects of a class share the dataset's ``thing_colors``, or unless ``instances`` Detectron2's color of the class.
    The hues of instances are 222.5 degrees apart, so that neighbors differ.
    """
    given = metadata.get("thing_colors", None)
    if given is None and instances:
        return [
            hsv_to_rgb((index * (math.sqrt(5) - 1) / 2 % 1, 0.9, 1))
            for index in range(len(classes))
        ]
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
    """Draw contours or boxes, labels and keypoints on an image.

    Instances differ in color if they have masks, or if there is one class, whose name is then left out. Labels that
    would hide other objects or labels are left out.

    Args:
        image: (H, W, 3) RGB, 0 to 255.
        classes, scores, notes: class index, score and further text of each object.
        boxes: (N, 4) x0, y0, x1, y1 in pixels.
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
    single = names is not None and len(names) == 1
    shown = [str(index) if names is None else names[index] for index in classes]
    texts: list[Sequence[str]] = [] if single else [shown]
    texts += [[f"{score:.0%}" for score in scores]] if scores is not None else []
    texts += [notes] if notes is not None else []
    labels = [" ".join(words).strip() for words in zip(*texts, strict=True)] or [""] * len(
        classes
    )
    scale = max(1.0, _SMALLEST_SIDE / max(image.shape[:2]))
    drawing = Contours(image, metadata, scale=scale)
    drawing._default_font_size = max(
        drawing._default_font_size, _SMALLEST_FONT / scale
    )  # it rounds down, up to 0
    colors = object_colors(metadata, classes, instances=single or masks is not None)
    with rc_context({"text.parse_math": False}):  # class names may have dollar signs
        drawing.overlay_instances(
            boxes=boxes,
            labels=labels,
            masks=masks,
            keypoints=keypoints,
            assigned_colors=colors,
            alpha=_ALPHA,
        )
        _hide_labels(
            drawing.output, boxes, [bool(note) for note in notes or [""] * len(classes)]
        )
    return drawing.get_output().get_image()


def _hide_labels(output: Any, boxes: np.ndarray, first: Sequence[bool]) -> None:
    """Hide the labels that would cover another label or, outside their own box, another object's box."""
    order = np.argsort(
        -np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    )  # in which Detectron2 draws
    to_image = output.ax.transData.inverted()
    shown = np.empty((0, 4))
    pairs = list(zip(order, output.ax.texts, strict=False))
    for index, text in sorted(pairs, key=lambda pair: not first[pair[0]]):
        x0, y1, x1, y0 = to_image.transform_bbox(
            text.get_window_extent(output.canvas.get_renderer())
        ).extents
        left, up = min(0, output.width - x1), min(0, output.height - y1)  # into the picture
        text.set_position(np.add(text.get_position(), (left, up)))
        x0, y0, x1, y1 = x0 + left, y0 + up, x1 + left, y1 + up
        inside = (boxes[index, :2] - 2 <= (x0, y0)).all() and (
            boxes[index, 2:] + 2 >= (x1, y1)
        ).all()
        others = shown if inside else np.concatenate([shown, np.delete(boxes, index, axis=0)])
        hidden = ((others[:, :2] < (x1, y1)) & (others[:, 2:] > (x0, y0))).all(axis=1).any()
        text.set_visible(not hidden)
        shown = shown if hidden else np.concatenate([shown, [(x0, y0, x1, y1)]])


def draw_predictions(image: np.ndarray, metadata: Metadata, instances: Instances) -> np.ndarray:
    """Draw the ``Instances`` that a detector returns, on the CPU; ``pred_masks`` may also be RLE."""
    masks = instances.get("pred_masks") if instances.has("pred_masks") else None
    return draw_objects(
        image,
        metadata,
        instances.pred_classes.tolist(),
        instances.pred_boxes.tensor.numpy(),
        scores=instances.scores.tolist(),
        masks=masks.numpy() if isinstance(masks, Tensor) else masks,
        keypoints=instances.pred_keypoints.numpy() if instances.has("pred_keypoints") else None,
    )


def draw_record(
    image: np.ndarray, metadata: Metadata, record: dict, notes: Sequence[str] | None = None
) -> np.ndarray:
    """Draw the annotations of a record in Detectron2's dataset format; they may have a ``score``."""
    objects = record.get("annotations", [])
    boxes = [
        BoxMode.convert(each["bbox"], each.get("bbox_mode", BoxMode.XYWH_ABS), BoxMode.XYXY_ABS)
        for each in objects
    ]
    masks, points, scores = (
        [each.get(key) for each in objects] for key in ("segmentation", "keypoints", "score")
    )
    complete: dict[str, Any] = {
        "masks": masks if all(masks) else None,
        "keypoints": np.array(points, dtype=float).reshape(len(points), -1, 3)
        if points and all(points)
        else None,
        "scores": scores if objects and None not in scores else None,
    }
    classes = [each["category_id"] for each in objects]
    return draw_objects(
        image,
        metadata,
        classes,
        np.array(boxes, dtype=float).reshape(-1, 4),
        notes=notes,
        **complete,
    )
