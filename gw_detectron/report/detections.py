"""Detections beside their ground truth: COCO evaluation, matching and errors."""

import contextlib
import copy
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from detectron2.data import Metadata
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ..data.images import read_image
from ..prediction.drawing import draw_objects, keypoints_of

#: kinds of a detection, by the object that it overlaps most: the same class; another class; one that a detection of
#: higher score has taken; an IoU below the threshold; an IoU below 0.1
CORRECT, WRONG_CLASS, DUPLICATE, POOR_BOX, BACKGROUND = "correct", "wrong class", "duplicate", "poor box", "background"
KINDS = (CORRECT, WRONG_CLASS, DUPLICATE, POOR_BOX, BACKGROUND)
_BACKGROUND_IOU = 0.1


@dataclass(frozen=True)
class ImageMatches:
    """The detections of an image and the objects that they miss.

    Args:
        image_id: of the dataset.
        found: the detections, best score first.
        kinds: one of :data:`KINDS` for each detection.
        matched: the annotation that each detection matches, or None.
        missed: annotations without a detection.
    """

    image_id: Any
    found: list[dict[str, Any]]
    kinds: list[str]
    matched: list[dict[str, Any] | None]
    missed: list[dict[str, Any]]

    @property
    def wrong(self) -> list[tuple[dict[str, Any], str]]:
        """Wrong detections and their kinds."""
        return [pair for pair in zip(self.found, self.kinds, strict=True) if pair[1] != CORRECT]


@dataclass(frozen=True)
class Detections:
    """Detections on a dataset, in COCO's result format, with the ground truth.

    Args:
        metadata: of the dataset.
        records: image id -> record in Detectron2's dataset format.
        truth: the annotations.
        results: the detections.
        tasks: of ``bbox``, ``segm`` and ``keypoints``.
        sigmas: of the keypoints; empty means COCO's.
    """

    metadata: Metadata
    records: Mapping[Any, dict[str, Any]]
    truth: COCO
    results: Sequence[dict[str, Any]]
    tasks: Sequence[str]
    sigmas: Sequence[float] = ()

    @property
    def category_ids(self) -> list[int]:
        """The ids of the classes, in the order of their names."""
        return sorted(self.truth.getCatIds())

    @property
    def class_names(self) -> list[str]:
        return [category["name"] for category in self.truth.loadCats(self.category_ids)]

    @cached_property
    def scores(self) -> dict[str, COCOeval]:
        """Task -> COCO's evaluation, accumulated and summarized."""
        return {task: self._evaluate(task) for task in self.tasks}

    def _evaluate(self, task: str) -> COCOeval:
        results = copy.deepcopy(list(self.results))
        if task == "segm":  # with a box, pycocotools takes its area for the mask's
            for result in results:
                result.pop("bbox")
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(self.truth, self._load(results), task)
            if task == "keypoints" and self.sigmas:
                evaluation.params.kpt_oks_sigmas = np.array(self.sigmas)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return evaluation

    def _load(self, results: list[dict[str, Any]]) -> COCO:
        if results:
            return self.truth.loadRes(results)
        empty = COCO()  # loadRes cannot read an empty list
        empty.dataset = {**self.truth.dataset, "annotations": []}
        empty.createIndex()
        return empty

    def precision(self, task: str, iou: float | None = None) -> np.ndarray:
        """Return the precision over recall of each class.

        Args:
            task: one of the tasks; all areas and the largest number of detections are taken.
            iou: the threshold; None averages over all.

        Returns:
            (recalls, classes), 0 to 1; NaN for classes without objects.
        """
        evaluation = self.scores[task]
        values = evaluation.eval["precision"][:, :, :, 0, -1]  # (IoU thresholds, recalls, classes)
        values = np.where(values < 0, np.nan, values)
        return values.mean(0) if iou is None else values[np.isclose(evaluation.params.iouThrs, iou)][0]

    def match(self, iou: float, score: float) -> list[ImageMatches]:
        """Match boxes and objects of any class, greedily by score.

        A detection takes the object that it overlaps most and that none of higher score has taken. Detections on crowd
        regions are left out.

        Args:
            iou: lowest IoU of a match.
            score: lowest score of the detections.

        Source: the kinds of errors follow TIDE (arXiv 2008.08115), but do not compare classes before the match.
        """
        by_image = defaultdict(list)
        for result in sorted(self.results, key=lambda result: -result["score"]):
            if result["score"] >= score:
                by_image[result["image_id"]].append(result)
        return [self._match_image(image_id, by_image[image_id], iou) for image_id in sorted(self.truth.imgs)]

    def _match_image(self, image_id: Any, detections: list[dict[str, Any]], iou: float) -> ImageMatches:
        objects = self.objects(image_id)
        crowd = np.array([bool(each.get("iscrowd")) for each in objects], dtype=bool)
        overlaps = mask.iou([each["bbox"] for each in detections], [each["bbox"] for each in objects], crowd)
        free = ~crowd
        image = ImageMatches(image_id, [], [], [], [])
        for detection, row in zip(detections, np.reshape(overlaps, (len(detections), len(objects))), strict=True):
            match = None
            if row[free].max(initial=0) >= iou:
                index = int(np.where(free, row, -1).argmax())
                free[index] = False
                match = objects[index]
                kind = CORRECT if match["category_id"] == detection["category_id"] else WRONG_CLASS
            elif row[crowd].max(initial=0) >= iou:
                continue
            else:
                overlap = row[~crowd].max(initial=0)
                kind = DUPLICATE if overlap >= iou else POOR_BOX if overlap >= _BACKGROUND_IOU else BACKGROUND
            image.found.append(detection)
            image.kinds.append(kind)
            image.matched.append(match)
        image.missed.extend(objects[index] for index in np.flatnonzero(free))
        return image

    def count_pairs(self, matches: Sequence[ImageMatches]) -> np.ndarray:
        """Count the pairs of a true and a predicted class.

        Returns:
            (K + 1, K + 1) int for K classes. Row: true class, the last one background. Column: predicted class, the
            last one missed.
        """
        index = {category: index for index, category in enumerate(self.category_ids)}
        table = np.zeros((len(index) + 1, len(index) + 1), dtype=int)
        for image in matches:
            for detection, match in zip(image.found, image.matched, strict=True):
                row = index[match["category_id"]] if match else -1
                table[row, index[detection["category_id"]]] += 1
            for annotation in image.missed:
                table[index[annotation["category_id"]], -1] += 1
        return table

    def file_name(self, image_id: Any) -> str:
        """Return the name of an image in the annotation file."""
        return self.truth.imgs[image_id]["file_name"]

    def objects(self, image_id: Any) -> list[dict[str, Any]]:
        """Return the annotations of an image."""
        return self.truth.imgToAnns[image_id]

    def draw(self, image_id: Any, objects: Iterable[dict[str, Any]], notes: Sequence[str] | None = None) -> np.ndarray:
        """Draw annotations or detections in COCO's format on their image, with a note at each.

        Returns:
            (H, W, 3) uint8 RGB.

        Raises:
            MissingFileError, DataError: the image cannot be read.
        """
        objects = list(objects)
        index = {category: index for index, category in enumerate(self.category_ids)}
        boxes = np.array([each["bbox"] for each in objects], dtype=float).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return draw_objects(
            read_image(self.records[image_id]["file_name"], "RGB"),
            self.metadata,
            [index[each["category_id"]] for each in objects],
            boxes,
            scores=[each["score"] for each in objects] if objects and "score" in objects[0] else None,
            notes=notes,
            masks=[self.truth.annToRLE(each) for each in objects] if "segm" in self.tasks else None,
            keypoints=keypoints_of(objects) if "keypoints" in self.tasks else None,
        )
