"""Detections beside their ground truth: COCO evaluation, matching and errors."""

import contextlib
import copy
import io
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
from ..pictures import draw_objects, keypoints_of

#: kinds of a detection, by the object that it overlaps most: the same class; another class; one that a detection of
#: higher score has taken; an IoU below the threshold; an IoU below 0.1
CORRECT, WRONG_CLASS, DUPLICATE, POOR_BOX, BACKGROUND = "correct", "wrong class", "duplicate", "poor box", "background"
KINDS = (CORRECT, WRONG_CLASS, DUPLICATE, POOR_BOX, BACKGROUND)
_BACKGROUND_IOU = 0.1
_MOST_DETECTIONS = 1000  # of an image, in the matching


@dataclass(frozen=True)
class ImageMatches:
    """The detections of an image and the objects that they miss.

    Args:
        image_id: of the dataset.
        found: the detections, best score first.
        kinds: of each of them, see :data:`KINDS`.
        taken: of each of them, the annotation that it matches.
        missed: annotations without a detection.
    """

    image_id: Any
    found: list[dict[str, Any]]
    kinds: list[str]
    taken: list[dict[str, Any] | None]
    missed: list[dict[str, Any]]

    @property
    def wrong(self) -> list[tuple[dict[str, Any], str]]:
        """Wrong detections and their kinds."""
        return [pair for pair in zip(self.found, self.kinds, strict=True) if pair[1] != CORRECT]

    @property
    def errors(self) -> int:
        return len(self.wrong) + len(self.missed)


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
        if task == "segm":  # with a box, pycocotools takes its area for that of the mask
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

    def match(self, iou: float, score: float) -> list[ImageMatches]:
        """Match boxes and objects of any class, greedily by score.

        A detection takes the object that it overlaps most and that none of higher score has taken. Detections on crowd
        regions are left out.

        Args:
            iou: lowest IoU of a match.
            score: lowest score of the detections.

        Source: the kinds of errors follow TIDE (arXiv 2008.08115), but do not compare classes before the match.
        """
        results = [copy.copy(result) for result in self.results if result["score"] >= score]
        with contextlib.redirect_stdout(io.StringIO()):
            detected = self._load(results)
            evaluation = COCOeval(self.truth, detected, "bbox")
            evaluation.params.useCats = 0
            evaluation.params.iouThrs = np.array([iou])
            evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, np.inf]], ["all"]
            evaluation.params.maxDets = [_MOST_DETECTIONS]
            evaluation.evaluate()
        found = {each["image_id"]: each for each in evaluation.evalImgs if each}
        return [
            self._matches(image_id, found[image_id], detected, iou)
            if image_id in found
            else ImageMatches(image_id, [], [], [], [])
            for image_id in sorted(self.truth.imgs)
        ]

    def _matches(self, image_id: Any, image: dict[str, Any], detected: COCO, iou: float) -> ImageMatches:
        boxes = [detected.anns[detection_id]["bbox"] for detection_id in image["dtIds"]]
        objects = [each["bbox"] for each in self.objects(image_id) if not each.get("iscrowd")]
        overlaps = mask.iou(boxes, objects, [0] * len(objects)) if boxes and objects else np.zeros((len(boxes), 1))
        best = overlaps.max(axis=1)
        found, kinds, taken = [], [], []
        rows = zip(image["dtIds"], image["dtMatches"][0], image["dtIgnore"][0], best, strict=True)
        for detection_id, truth_id, ignored, overlap in rows:
            if ignored:
                continue
            detection = detected.anns[detection_id]
            match = self.truth.anns[int(truth_id)] if truth_id else None
            found.append(detection)
            taken.append(match)
            if match is not None:
                kinds.append(CORRECT if match["category_id"] == detection["category_id"] else WRONG_CLASS)
            elif overlap >= iou:
                kinds.append(DUPLICATE)
            else:
                kinds.append(POOR_BOX if overlap >= _BACKGROUND_IOU else BACKGROUND)
        missed = [
            self.truth.anns[truth_id]
            for truth_id, detection_id, ignored in zip(
                image["gtIds"], image["gtMatches"][0], image["gtIgnore"], strict=True
            )
            if not (detection_id or ignored)
        ]
        return ImageMatches(image_id, found, kinds, taken, missed)

    def file_name(self, image_id: Any) -> str:
        """Return the name of an image in the annotation file."""
        return self.truth.imgs[image_id]["file_name"]

    def objects(self, image_id: Any) -> list[dict[str, Any]]:
        """Return the annotations of an image."""
        return self.truth.imgToAnns[image_id]

    def draw(self, image_id: Any, objects: Iterable[dict[str, Any]], notes: Sequence[str] | None = None) -> np.ndarray:
        """Draw annotations or detections on their image.

        Args:
            image_id: of the dataset.
            objects: in COCO's format.
            notes: text of each object.

        Returns:
            (H, W, 3) uint8 RGB.

        Raises:
            MissingFileError, DataError: the image cannot be read.
        """
        objects = list(objects)
        places = {category: index for index, category in enumerate(self.category_ids)}
        boxes = np.array([each["bbox"] for each in objects], dtype=float).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        return draw_objects(
            read_image(self.records[image_id]["file_name"], "RGB"),
            self.metadata,
            [places[each["category_id"]] for each in objects],
            boxes,
            scores=[each["score"] for each in objects] if objects and "score" in objects[0] else None,
            notes=notes,
            masks=[self.truth.annToRLE(each) for each in objects] if "segm" in self.tasks else None,
            keypoints=keypoints_of(objects) if "keypoints" in self.tasks else None,
        )
