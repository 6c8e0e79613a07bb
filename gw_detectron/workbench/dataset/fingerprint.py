"""Statistics of COCO files: object sizes at training resolution, objects per image, classes, mask formats."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from detectron2.config import CfgNode

from .coco_content import RecordReader
from .coco_scores import COCO_TASKS
from .geometry import is_polygon

#: score -> areas in pixels that it counts. Source: pycocotools, Params.setDetParams
_AREA_RANGES = {"APs": (0, 32**2), "APm": (32**2, 96**2), "APl": (96**2, math.inf)}


@dataclass(frozen=True)
class Fingerprint:
    """Images and objects of COCO files.

    An object can be learned if it is not a crowd, its image and category are listed, its box has an area inside the
    image, and its polygons, if it has some, are not all invalid. Only such objects are in the arrays.
    """

    classes: list[str]  # in the order of the category ids
    images: np.ndarray  # width and height of each image, (I, 2)
    # width and height of each object's box in pixels of its image, (N, 2)
    boxes: np.ndarray
    areas: np.ndarray  # area of each object as COCO's scores by size take it, (N)
    image: np.ndarray  # index of each object's image, (N)
    category: np.ndarray  # index of each object's class, (N)
    # whether each image has a record that is not a crowd, (I); its box may have no area
    is_annotated: np.ndarray
    keypoints: np.ndarray  # number of labeled keypoints of each image, (I)
    # number of objects by their segmentation: "polygon", "rle" or "none"
    masks: Counter[str]

    @cached_property
    def per_image(self) -> np.ndarray:
        """Number of objects of each image, (I)."""
        return np.bincount(self.image, minlength=len(self.images))

    def trained_images(self, cfg: CfgNode) -> int:
        """Return the number of images that pass the two filters of Detectron2's loader."""
        is_kept = self.is_annotated | (not cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS)
        if cfg.MODEL.KEYPOINT_ON:
            fewest = cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
            is_kept &= self.keypoints >= fewest
        return int(is_kept.sum())

    @cached_property
    def most_of_a_class(self) -> int:
        """Largest number of objects of one class in an image."""
        return max(
            Counter(zip(self.image, self.category, strict=True)).values(), default=0
        )

    def dense_score(self, task: str, detections: int) -> str:
        """Name the AP that counts as many detections per image as there are objects; "" if COCO's AP does.

        COCO's AP counts the best 100 detections per image and class, 20 of keypoints. Where an image has more objects
        of a class, a perfect detector has less than 100 AP. ``AP@N`` counts N: as many as an image has objects of a
        class or, if larger, ``detections``, the model's number per image.
        """
        most = self.most_of_a_class
        counted = COCO_TASKS[task].detections
        return f"AP@{max(most, detections)}" if most > counted else ""

    @cached_property
    def per_class(self) -> np.ndarray:
        """Number of objects of each class, (C)."""
        return np.bincount(self.category, minlength=len(self.classes))

    @cached_property
    def images_per_class(self) -> np.ndarray:
        """Number of images with each class, (C)."""
        pairs = np.unique([self.image, self.category], axis=1)
        return np.bincount(pairs[1], minlength=len(self.classes))

    def scored_objects(self, score: str) -> int:
        """Return the number of objects that an AP counts, by its name: APs, APm, APl, AP-CLASS or another one."""
        if score in _AREA_RANGES:
            low, high = _AREA_RANGES[score]
            return int(((self.areas >= low) & (self.areas <= high)).sum())
        name = score.removeprefix("AP-")
        if name != score and name in self.classes:
            return int(self.per_class[self.classes.index(name)])
        return len(self.boxes)

    def resized(self, shorter: float, longest: float) -> np.ndarray:
        """Return the boxes after ``ResizeShortestEdge`` of the images, (N, 2); ``shorter`` 0 resizes none."""
        scales = np.minimum(
            shorter / self.images.min(axis=1), longest / self.images.max(axis=1)
        )
        return self.boxes * (scales[self.image, None] if shorter else 1.0)

    def sizes(self, shorter: float, longest: float) -> np.ndarray:
        """Return the square roots of the resized boxes' areas, (N), as anchors are measured."""
        return np.sqrt(self.resized(shorter, longest).prod(axis=1))


def read_fingerprint(content: Any) -> Fingerprint:
    """Read the content of a COCO file; another format is a DataError."""
    reader = RecordReader()
    with reader.errors():
        # as Detectron2 counts classes
        names = {row["id"]: row["name"] for row in content["categories"]}
        categories = {number: index for index, number in enumerate(sorted(names))}

        images: dict[Any, int] = {}
        sizes: list[tuple[float, float]] = []
        for image in reader.read(content["images"]):
            images[image["id"]] = len(sizes)
            sizes.append(_size(image))

        objects = []
        masks: Counter[str] = Counter()
        is_annotated = np.zeros(len(sizes), bool)
        keypoints = np.zeros(len(sizes), int)
        for annotation in reader.read(content.get("annotations", ())):
            image = images.get(annotation.get("image_id"))
            category = categories.get(annotation.get("category_id"))
            if image is None or category is None:
                continue
            visibility = (annotation.get("keypoints") or ())[2::3]
            keypoints[image] += np.count_nonzero(np.array(visibility) > 0)
            mask = annotation.get("segmentation")
            if annotation.get("iscrowd") or not _is_recorded(mask):
                continue
            is_annotated[image] = True
            box = _clipped(annotation.get("bbox"), sizes[image])
            if box is not None:
                area = float(annotation.get("area") or box[0] * box[1])
                objects.append((*box, area, image, category))
                masks[_mask_kind(mask)] += 1

    table = np.array(objects, float).reshape(-1, 5)
    return Fingerprint(
        classes=[names[number] for number in categories],
        images=np.array(sizes).reshape(-1, 2),
        boxes=table[:, :2],
        areas=table[:, 2],
        image=table[:, 3].astype(int),
        category=table[:, 4].astype(int),
        is_annotated=is_annotated,
        keypoints=keypoints,
        masks=masks,
    )


def join_fingerprints(parts: Sequence[Fingerprint]) -> Fingerprint:
    """Join the fingerprints of files that have the same classes."""
    counts = [len(part.images) for part in parts]
    first = np.cumsum(counts) - counts  # image of each part
    shifted = [
        replace(part, image=part.image + start)
        for part, start in zip(parts, first, strict=True)
    ]

    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in shifted])
        for field in fields(Fingerprint)
        if field.type is np.ndarray
    }
    return Fingerprint(
        classes=max((part.classes for part in parts), key=len),
        masks=sum((part.masks for part in parts), Counter()),
        **joined,
    )


def _size(image: dict[str, Any]) -> tuple[float, float]:
    width, height = float(image["width"]), float(image["height"])
    if not (1 <= width < math.inf and 1 <= height < math.inf):
        raise ValueError("width or height is not a number of 1 or more")
    return width, height


def _is_recorded(mask: Any) -> bool:
    """Return whether Detectron2 reads an object with this mask; not if it has polygons, all invalid."""
    return not mask or isinstance(mask, dict) or any(map(is_polygon, mask))


def _mask_kind(mask: Any) -> str:
    if isinstance(mask, dict):
        return "rle"
    return "polygon" if mask else "none"


def _clipped(box: Any, image: tuple[float, float]) -> tuple[float, float] | None:
    """Return width and height of a box inside its image, None if it has no area there."""
    if not isinstance(box, list) or len(box) != 4 or not all(map(math.isfinite, box)):
        return None
    x, y, width, height = box
    inside_width = min(x + width, image[0]) - max(x, 0.0)
    inside_height = min(y + height, image[1]) - max(y, 0.0)
    if inside_width <= 0 or inside_height <= 0:
        return None
    return inside_width, inside_height


def anchor_shapes(sizes: list, ratios: list, strides: Sequence[int]) -> np.ndarray:
    """Return width, height and stride of every anchor, (A, 3).

    A single list of sizes or ratios is for all levels.
    """
    levels = len(strides)
    sizes = sizes * levels if len(sizes) == 1 else sizes
    ratios = ratios * levels if len(ratios) == 1 else ratios
    return np.array(
        [
            (size / ratio**0.5, size * ratio**0.5, stride)
            for stride, level_sizes, level_ratios in zip(
                strides, sizes, ratios, strict=False
            )
            for size in level_sizes
            for ratio in level_ratios
        ]
    )


def best_overlaps(boxes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Return the IoU of each box, (N, 2), with the most similar anchor, (A, 3).

    Their centers differ as they do on average: by a quarter of the stride along each side.
    """
    best = np.zeros(len(boxes))
    areas = boxes.prod(axis=1)
    for width, height, stride in anchors:
        anchor = np.array([width, height])
        within = np.minimum(boxes, anchor)
        shifted = (boxes + anchor) / 2 - stride / 4
        overlap = np.minimum(within, shifted).clip(min=0).prod(axis=1)
        best = np.maximum(best, overlap / (areas + width * height - overlap))
    return best


def anchor_fit(
    data: Fingerprint, sides: tuple[float, float], anchors: np.ndarray
) -> float:
    """Return the mean IoU of objects in resized images with their best anchor.

    Classes count equally, as for AP.
    """
    step = -(-len(data.boxes) // 5000)
    category = data.category[::step]
    overlaps = best_overlaps(data.resized(*sides)[::step], anchors)
    weights = 1 / np.bincount(category)[category]
    return float(np.average(overlaps, weights=weights))
