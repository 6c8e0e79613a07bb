"""Statistics of COCO files: object sizes at training resolution, objects per image, classes, mask formats."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import DataError
from .coco_scores import counted_detections


@dataclass(frozen=True)
class Fingerprint:
    """Images and objects of COCO files.

    An object can be learned if it is not a crowd, its image and category are listed, and its box has an area inside the
    image. Only such objects are in the arrays.
    """

    classes: list[str]  # in the order of the category ids
    images: np.ndarray  # width and height of each image, (I, 2)
    boxes: np.ndarray  # width and height of each object's box in pixels of its image, (N, 2)
    image: np.ndarray  # index of each object's image, (N)
    category: np.ndarray  # index of each object's class, (N)
    masks: Counter[str]  # number of objects by their segmentation: "polygon", "rle" or "none"
    crowds: int  # annotations with iscrowd, which are not trained on
    unusable: int  # other annotations that cannot be learned

    @cached_property
    def per_image(self) -> np.ndarray:
        """Number of objects of each image, (I)."""
        return np.bincount(self.image, minlength=len(self.images))

    @cached_property
    def most_of_a_class(self) -> int:
        """Largest number of objects of one class in an image."""
        return max(Counter(zip(self.image, self.category, strict=True)).values(), default=0)

    def dense_score(self, task: str, detections: int) -> str:
        """Name the AP that counts as many detections per image as there are objects; "" if COCO's AP does.

        COCO's AP counts the best 100 detections per image and class, 20 of keypoints. Where an image has more objects
        of a class, a perfect detector has less than 100 AP. ``AP@N`` counts N: as many as an image has objects of a
        class or, if larger, ``detections``, the model's number per image.
        """
        most = self.most_of_a_class
        return f"AP@{max(most, detections)}" if most > counted_detections(task) else ""

    @cached_property
    def per_class(self) -> np.ndarray:
        """Number of objects of each class, (C)."""
        return np.bincount(self.category, minlength=len(self.classes))

    @cached_property
    def images_per_class(self) -> np.ndarray:
        """Number of images with each class, (C)."""
        pairs = np.unique(self.image * max(1, len(self.classes)) + self.category)
        return np.bincount(pairs % max(1, len(self.classes)), minlength=len(self.classes))

    def resized(self, shorter: float, longest: float) -> np.ndarray:
        """Return the boxes after ``ResizeShortestEdge`` of the images, (N, 2); ``shorter`` 0 resizes none."""
        scales = np.minimum(
            shorter / self.images.min(axis=1), longest / self.images.max(axis=1)
        )
        return self.boxes * (scales[self.image, None] if shorter else 1.0)

    def sizes(self, shorter: float, longest: float) -> np.ndarray:
        """Return the square roots of the resized boxes' areas, (N), as anchors are measured."""
        return np.sqrt(self.resized(shorter, longest).prod(axis=1))


def read_fingerprint(contents: Iterable[Any]) -> Fingerprint:
    """Read the contents of COCO files, which have the same classes; one in another format is a DataError."""
    classes: list[str] = []
    sizes: list[tuple[float, float]] = []
    rows: list[tuple[float, ...]] = []
    masks: Counter[str] = Counter()
    crowds = annotations = 0
    record: Any = "the lists images, annotations and categories"
    try:
        for content in contents:
            names = {each["id"]: each["name"] for each in content["categories"]}
            numbers = {
                number: index for index, number in enumerate(sorted(names))
            }  # as Detectron2 counts classes
            classes = max(classes, [names[number] for number in numbers], key=len)
            places = {}
            for record in content["images"]:
                places[record["id"]] = len(sizes)
                sizes.append((float(record["width"]), float(record["height"])))
            for record in content["annotations"]:
                annotations += 1
                if record.get("iscrowd"):
                    crowds += 1
                    continue
                image, category = (
                    places.get(record.get("image_id"), -1),
                    numbers.get(record.get("category_id"), -1),
                )
                if (
                    min(image, category) < 0
                    or (size := _clipped(record.get("bbox"), sizes[image])) is None
                ):
                    continue
                mask = record.get("segmentation")
                masks["rle" if isinstance(mask, dict) else "polygon" if mask else "none"] += 1
                rows.append((*size, image, category))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"not in COCO format at {record!s:.80}: {type(error).__name__}: {error}"
        ) from error
    table = np.array(rows).reshape(-1, 4)
    return Fingerprint(
        classes,
        np.array(sizes).reshape(-1, 2),
        table[:, :2],
        table[:, 2].astype(int),
        table[:, 3].astype(int),
        masks,
        crowds,
        annotations - crowds - len(rows),
    )


def _clipped(box: Any, image: tuple[float, float]) -> tuple[float, float] | None:
    """Return width and height of a box inside its image, None if it has no area there."""
    if not isinstance(box, list) or len(box) != 4 or not all(map(math.isfinite, box)):
        return None
    x, y, width, height = box
    width, height = (
        min(x + width, image[0]) - max(x, 0.0),
        min(y + height, image[1]) - max(y, 0.0),
    )
    return (width, height) if width > 0 and height > 0 else None


def anchor_shapes(sizes: list, ratios: list, strides: Sequence[int]) -> np.ndarray:
    """Return width, height and stride of every anchor, (A, 3); a single list of sizes or ratios is for all levels."""
    lists = (each * len(strides) if len(each) == 1 else each for each in (sizes, ratios))
    levels = zip(strides, *lists, strict=False)
    return np.array(
        [
            (s / r**0.5, s * r**0.5, stride)
            for stride, level, some in levels
            for s in level
            for r in some
        ]
    )


def best_overlaps(boxes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Return the IoU of each box, (N, 2), with the most similar anchor, (A, 3).

    Their centers differ as they do on average: by a quarter of the stride along each side.
    """
    found = np.zeros(len(boxes))
    for *anchor, stride in anchors:
        inside = (
            np.minimum(np.minimum(boxes, anchor), (boxes + anchor) / 2 - stride / 4)
            .clip(min=0)
            .prod(axis=1)
        )
        found = np.maximum(found, inside / (boxes.prod(axis=1) + np.prod(anchor) - inside))
    return found


def anchor_fit(found: Fingerprint, sides: tuple[float, float], anchors: np.ndarray) -> float:
    """Return the mean IoU of objects in resized images with their best anchor; classes count equally, as for AP."""
    step = -(-len(found.boxes) // 5000)
    category, overlaps = (
        found.category[::step],
        best_overlaps(found.resized(*sides)[::step], anchors),
    )
    return float(np.average(overlaps, weights=1 / np.bincount(category)[category]))
