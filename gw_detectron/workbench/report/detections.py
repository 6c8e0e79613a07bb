"""Detections beside their ground truth: COCO evaluation, matching and errors."""

import contextlib
import copy
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import Metadata
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ..dataset.coco_scores import COCO_TASKS
from ..dataset.fingerprint import Fingerprint, read_fingerprint
from ..dataset.geometry import is_polygon, is_run_length
from ..images import read_image
from ..images.class_names import shown_names
from ..images.drawing import draw_record
from ..run.evaluation import dense_average_precision

#: kinds of a detection, by the object that it overlaps most: the same class; another class; one
#: that a detection of higher score has taken; an IoU below 0.5; an IoU below 0.1
CORRECT = "correct"
WRONG_CLASS = "wrong class"
DUPLICATE = "duplicate"
POOR_BOX = "poor box"
BACKGROUND = "background"
MISSED = "missed"  # of an object without a detection
KINDS = (CORRECT, WRONG_CLASS, DUPLICATE, POOR_BOX, BACKGROUND, MISSED)

_IOU = 0.5
_BACKGROUND_IOU = 0.1

#: reasons why an object is not found at any score
NEIGHBOR = "its box was matched to a neighbor, or is beyond COCO's limit per image"
OTHER_CLASS = "only boxes of another class"
FAR = "only boxes with an IoU of 0.1 to 0.5"
NO_BOX = "no box"
UNFOUND = (NEIGHBOR, OTHER_CLASS, FAR, NO_BOX)

Entry = dict[str, Any]  # an annotation or a result in COCO's format


class Match(NamedTuple):
    """A detection and the object that it is matched to; one of them is None for most errors."""

    kind: str  # of KINDS
    detection: Entry | None
    annotation: Entry | None


class ImageMatches(NamedTuple):
    """The detections of an image, best score first, then the objects that they miss."""

    image_id: Any
    matches: list[Match]

    def of_kind(self, kind: str) -> list[Match]:
        return [match for match in self.matches if match.kind == kind]

    @property
    def num_errors(self) -> int:
        """The number of missed objects and wrong detections."""
        return len(self.matches) - len(self.of_kind(CORRECT))


@dataclass(frozen=True)
class Detections:
    """Detections on a dataset, in COCO's result format, with the ground truth."""

    cfg: CfgNode
    metadata: Metadata
    # image id -> record in Detectron2's dataset format
    records: Mapping[Any, dict[str, Any]]
    truth: COCO
    results: Sequence[Entry]
    tasks: Sequence[str]  # of bbox, segm and keypoints

    @cached_property
    def classes(self) -> dict[int, str]:
        """Category id -> name as people see it, in the order of the model's classes."""
        numbers = sorted(self.truth.cats)
        names = [str(self.truth.cats[number]["name"]) for number in numbers]
        return dict(zip(numbers, shown_names(names), strict=True))

    def file_of(self, image: ImageMatches) -> str:
        return self.truth.imgs[image.image_id]["file_name"]

    @cached_property
    def objects(self) -> list[Entry]:
        """The annotations that can be found: no crowds."""
        annotations = self.truth.anns.values()
        return [
            annotation for annotation in annotations if not annotation.get("iscrowd")
        ]

    @cached_property
    def evaluations(self) -> dict[str, COCOeval]:
        """Task -> COCO's evaluation, accumulated and summarized."""
        evaluations = {}
        for task in self.tasks:
            evaluation = self._evaluation(self.results, task)
            if task == "keypoints" and self.cfg.TEST.KEYPOINT_OKS_SIGMAS:  # else COCO's
                evaluation.params.kpt_oks_sigmas = np.array(
                    self.cfg.TEST.KEYPOINT_OKS_SIGMAS
                )

            with _quiet():
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
            evaluations[task] = evaluation
        return evaluations

    def scores(self, task: str) -> dict[str, float | None]:
        """Return the scores of a task in percent, by name; None if undefined.

        ``AP@N`` is among them if COCO's AP does not count all objects.
        """
        evaluation = self.evaluations[task]
        scores: dict[str, float | None] = {}
        for name, value in zip(COCO_TASKS[task].scores, evaluation.stats, strict=False):
            scores[name] = float(100 * value) if value >= 0 else None

        dense = self.fingerprint.dense_score(task, self.cfg.TEST.DETECTIONS_PER_IMAGE)
        if dense:
            scores[dense] = dense_average_precision(evaluation, dense)
        return scores

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The statistics of the ground truth."""
        return read_fingerprint(self.truth.dataset)

    def _evaluation(self, results: Iterable[Entry], task: str) -> COCOeval:
        results = copy.deepcopy(list(results))  # pycocotools changes them
        if task == "segm":  # with a box, pycocotools takes its area for the mask's
            for result in results:
                result.pop("bbox")

        with _quiet():
            if results:
                return COCOeval(self.truth, self.truth.loadRes(results), task)
            empty = COCO()  # loadRes cannot read an empty list
            empty.dataset = {**self.truth.dataset, "annotations": []}
            empty.createIndex()
            return COCOeval(self.truth, empty, task)

    def precision(self, task: str, iou: float | None = None) -> np.ndarray:
        """Return the precision over recall, (recalls, classes); NaN for absent classes.

        It is that at an IoU, or the mean over COCO's IoUs.
        """
        evaluation = self.evaluations[task]
        precision = evaluation.eval["precision"]
        values = precision[:, :, :, 0, -1]  # (IoUs, recalls, classes)
        values = np.where(values < 0, np.nan, values)
        if iou is None:
            return values.mean(0)
        return values[np.isclose(evaluation.params.iouThrs, iou)][0]

    def unfound(self) -> dict[str, int]:
        """Count by reason the objects that no box finds, of any score, at an IoU of 0.5."""
        boxes = defaultdict(list)
        for result in self.results:
            boxes[result["image_id"]].append(result)

        counts = dict.fromkeys(UNFOUND, 0)
        evaluation = self.evaluations["bbox"]
        all_sizes = evaluation.params.areaRng[0]
        for entry in evaluation.evalImgs:
            if entry is None or entry["aRng"] != all_sizes:
                continue
            unmatched = (entry["gtMatches"][0] == 0) & (entry["gtIgnore"] == 0)
            for number in np.array(entry["gtIds"])[unmatched]:
                reason = _reason(self.truth.anns[number], boxes[entry["image_id"]])
                counts[reason] += 1
        return counts

    def match(self, score: float) -> list[ImageMatches]:
        """Match boxes of this score and more to objects of any class.

        pycocotools matches them at an IoU of 0.5. Detections on crowd regions are left out.

        Source: the kinds of errors follow TIDE (arXiv 2008.08115), but do not compare classes
        before the match.
        """
        results = [result for result in self.results if result["score"] >= score]
        found = self._matched(results, by_class=False)
        pairs = zip(sorted(self.truth.imgs), found, strict=True)
        return [
            self._sort_out(image_id, matches, results) for image_id, matches in pairs
        ]

    def _matched(
        self, results: Sequence[Entry], *, by_class: bool
    ) -> list[dict[str, Any] | None]:
        """Return pycocotools' matches of all boxes at an IoU of 0.5, for each image, or each class and image."""
        evaluation = self._evaluation(results, "bbox")
        params = evaluation.params
        params.useCats = int(by_class)
        params.iouThrs = np.array([_IOU])
        params.maxDets = [len(results)]
        params.areaRng = [[0, np.inf]]
        params.areaRngLbl = ["all"]
        with _quiet():
            evaluation.evaluate()
        return evaluation.evalImgs

    @cached_property
    def best_threshold(self) -> tuple[float, float]:
        """The score above which boxes have the highest F1, and this F1; 0.5 and 0 without a correct box.

        F1 = 2 * correct boxes / (boxes + objects). As in AP50, boxes are matched to objects of their class, better ones
        first, so that one match serves all scores.
        """
        found: list[tuple[float, bool]] = []
        for entry in self._matched(self.results, by_class=True):
            if entry is None:
                continue
            # not by dtMatches: the id of an annotation may be 0
            is_correct = np.isin(entry["dtIds"], entry["gtMatches"][0])
            counts = entry["dtIgnore"][0] == 0
            scored = np.array(entry["dtScores"])[counts]
            found += zip(scored, is_correct[counts], strict=True)

        found.sort(reverse=True)
        scores, is_correct = np.array(found).reshape(-1, 2).T
        boxes = np.arange(1, len(scores) + 1)
        f1 = 2 * np.cumsum(is_correct) / (boxes + len(self.objects))

        # between two scores, as predictions are those above
        lower = np.append(scores[1:], 0.0)
        f1[scores == lower] = 0
        if not f1.any():
            return 0.5, 0.0
        best = int(np.argmax(f1))
        return float(scores[best] + lower[best]) / 2, float(f1[best])

    def _sort_out(
        self, image_id: Any, found: dict | None, results: Sequence[Entry]
    ) -> ImageMatches:
        """Name the kind of each detection of an image from pycocotools' matches."""
        image = ImageMatches(image_id, [])
        if found is None:  # neither objects nor detections
            return image

        annotations = self.truth.imgToAnns[image_id]
        objects = [one for one in annotations if not one.get("iscrowd")]
        # keys: the ids of detections begin at 1, those of annotations perhaps at 0, which is none
        taken = dict(zip(found["gtMatches"][0], found["gtIds"], strict=True))
        for number, ignored in zip(found["dtIds"], found["dtIgnore"][0], strict=True):
            if not ignored:
                detection = results[number - 1]
                annotation = self.truth.anns.get(taken.get(number))
                kind = _kind(detection, annotation, objects)
                image.matches.append(Match(kind, detection, annotation))

        hit = {match.annotation["id"] for match in image.matches if match.annotation}
        for annotation in objects:
            if annotation["id"] not in hit:
                image.matches.append(Match(MISSED, None, annotation))
        return image

    def draw(
        self, image_id: Any, objects: Sequence[Entry], notes: Sequence[str]
    ) -> np.ndarray:
        """Draw annotations or detections on their image, with notes."""
        hidden = {
            task.result_key
            for name, task in COCO_TASKS.items()
            if name not in self.tasks
        }
        shown = []
        for one in objects:
            drawn = {key: value for key, value in one.items() if key not in hidden}
            drawn["category_id"] = list(self.classes).index(one["category_id"])
            polygons = drawn.get("segmentation")
            if isinstance(polygons, list):  # Detectron2 leaves out others, too
                drawn["segmentation"] = list(filter(is_polygon, polygons))
            shown.append(drawn)

        file = self.records[image_id]["file_name"]
        image = read_image(file, "RGB", self.cfg.INPUT.PERCENTILES)
        return draw_record(image, self.metadata, {"annotations": shown}, notes)


def is_usable_result(row: Any, truth: COCO) -> bool:
    """Return whether pycocotools can evaluate a row of a results file."""
    try:
        image = truth.imgs[row["image_id"]]
        category = truth.cats[row["category_id"]]
        points = row.get("keypoints", [])
        is_finite = all(map(math.isfinite, [row["score"], *row["bbox"], *points]))
        is_number = not isinstance(row["score"], bool)  # numpy cannot negate true
        expected = 4 + 3 * len(category["keypoints"] if "keypoints" in row else [])
        is_complete = len(row["bbox"]) + len(points) == expected

        size = (image["height"], image["width"])
        has_mask = "segmentation" not in row or (
            is_run_length(row["segmentation"], size)
            and isinstance(row["segmentation"]["counts"], str)
        )
        return is_finite and is_number and is_complete and has_mask
    except (ArithmeticError, LookupError, TypeError, AttributeError):
        return False


def _quiet() -> contextlib.redirect_stdout:
    """Keep pycocotools from printing."""
    return contextlib.redirect_stdout(io.StringIO())


def _kind(detection: Entry, annotation: Entry | None, objects: Iterable[Entry]) -> str:
    if annotation is not None:
        same = annotation["category_id"] == detection["category_id"]
        return CORRECT if same else WRONG_CLASS

    overlap = _largest_overlap(detection, objects)
    if overlap >= _IOU:
        return DUPLICATE
    return POOR_BOX if overlap >= _BACKGROUND_IOU else BACKGROUND


def _reason(annotation: Entry, found: Iterable[Entry]) -> str:
    """Return why no box of an image finds an object."""
    category = annotation["category_id"]
    of_class = [result for result in found if result["category_id"] == category]
    if _largest_overlap(annotation, of_class) >= _IOU:
        return NEIGHBOR

    overlap = _largest_overlap(annotation, found)
    if overlap >= _IOU:
        return OTHER_CLASS
    return FAR if overlap >= _BACKGROUND_IOU else NO_BOX


def _largest_overlap(one: Entry, others: Iterable[Entry]) -> float:
    """Return the largest IoU of a box with others, 0 without any."""
    overlaps = mask.iou([other["bbox"] for other in others], [one["bbox"]], [0])
    return np.max(overlaps, initial=0)
