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
from detectron2.config import CfgNode
from detectron2.data import Metadata
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from ..dataset.fingerprint import Fingerprint, read_fingerprint
from ..dataset.geometry import is_polygon
from ..images import read_image
from ..predict import draw_record
from ..run.evaluation import dense_average_precision

#: kinds of a detection, by the object that it overlaps most: the same class; another class; one that a detection of
#: higher score has taken; an IoU below 0.5; an IoU below 0.1
CORRECT, WRONG_CLASS, DUPLICATE, POOR_BOX, BACKGROUND = (
    "correct",
    "wrong class",
    "duplicate",
    "poor box",
    "background",
)
KINDS = (CORRECT, WRONG_CLASS, DUPLICATE, POOR_BOX, BACKGROUND)
_IOU, _BACKGROUND_IOU = 0.5, 0.1
#: why an object is not found at any score
UNFOUND = (
    "its box was matched to a neighbor, or is beyond COCO's limit per image",
    "only boxes of another class",
    "only boxes with an IoU of 0.1 to 0.5",
    "no box",
)
#: task -> key of a detection
RESULT_KEYS = {"bbox": "bbox", "segm": "segmentation", "keypoints": "keypoints"}


@dataclass(frozen=True)
class ImageMatches:
    """The detections of an image and the objects that they miss."""

    image_id: Any
    found: list[dict[str, Any]]  # best score first
    kinds: list[str]  # of KINDS, for each detection
    matched: list[dict[str, Any] | None]  # the annotation that each detection matches
    missed: list[dict[str, Any]]  # annotations

    @property
    def errors(self) -> int:
        """The number of missed objects and wrong detections."""
        return len(self.missed) + len(self.kinds) - self.kinds.count(CORRECT)


@dataclass(frozen=True)
class Detections:
    """Detections on a dataset, in COCO's result format, with the ground truth."""

    cfg: CfgNode
    metadata: Metadata
    records: Mapping[Any, dict[str, Any]]  # image id -> record in Detectron2's dataset format
    truth: COCO
    results: Sequence[dict[str, Any]]
    tasks: Sequence[str]  # of bbox, segm and keypoints

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
        evaluations = {task: self._evaluation(self.results, task) for task in self.tasks}
        for task, evaluation in evaluations.items():
            if task == "keypoints" and self.cfg.TEST.KEYPOINT_OKS_SIGMAS:  # else COCO's
                evaluation.params.kpt_oks_sigmas = np.array(self.cfg.TEST.KEYPOINT_OKS_SIGMAS)
            with contextlib.redirect_stdout(io.StringIO()):
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
        return evaluations

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The statistics of the ground truth."""
        return read_fingerprint([self.truth.dataset])

    def dense_score(self, task: str) -> dict[str, float]:
        """Return ``AP@N`` by its name, if COCO's AP does not count all objects."""
        name = self.fingerprint.dense_score(task, self.cfg.TEST.DETECTIONS_PER_IMAGE)
        return {name: dense_average_precision(self.scores[task], name)} if name else {}

    def _evaluation(self, results: Iterable[dict[str, Any]], task: str) -> COCOeval:
        results = copy.deepcopy(list(results))  # pycocotools changes them
        if task == "segm":  # with a box, pycocotools takes its area for the mask's
            for result in results:
                result.pop("bbox")
        with contextlib.redirect_stdout(io.StringIO()):
            if results:
                return COCOeval(self.truth, self.truth.loadRes(results), task)
            empty = COCO()  # loadRes cannot read an empty list
            empty.dataset = {**self.truth.dataset, "annotations": []}
            empty.createIndex()
            return COCOeval(self.truth, empty, task)

    def precision(self, task: str, iou: float | None = None) -> np.ndarray:
        """Return the precision over recall, (recalls, classes), at an IoU or averaged; NaN for absent classes."""
        evaluation = self.scores[task]
        values = evaluation.eval["precision"][
            :, :, :, 0, -1
        ]  # (IoU thresholds, recalls, classes)
        values = np.where(values < 0, np.nan, values)
        return (
            values.mean(0)
            if iou is None
            else values[np.isclose(evaluation.params.iouThrs, iou)][0]
        )

    def unfound(self) -> dict[str, int]:
        """Count by reason the objects that no box finds, of any score, in COCO's evaluation at an IoU of 0.5."""
        counts = dict.fromkeys(UNFOUND, 0)
        boxes = defaultdict(list)
        for result in self.results:
            boxes[result["image_id"]].append(result)
        evaluation = self.scores["bbox"]
        for entry in filter(None, evaluation.evalImgs):
            if entry["aRng"] != evaluation.params.areaRng[0]:  # all sizes
                continue
            for number in np.array(entry["gtIds"])[
                (entry["gtMatches"][0] == 0) & (entry["gtIgnore"] == 0)
            ]:
                found = boxes[entry["image_id"]]
                overlaps = mask.iou(
                    [each["bbox"] for each in found], [self.truth.anns[number]["bbox"]], [0]
                )
                overlaps = np.array(overlaps).reshape(-1)
                of_class = overlaps[
                    [each["category_id"] == entry["category_id"] for each in found]
                ]
                best, own = np.max(overlaps, initial=0), np.max(of_class, initial=0)
                reached = (own >= _IOU, best >= _IOU, best >= _BACKGROUND_IOU, True)
                counts[UNFOUND[reached.index(True)]] += 1
        return counts

    def match(self, score: float) -> list[ImageMatches]:
        """Match boxes of this score and more to objects of any class, as pycocotools does at an IoU of 0.5.

        Detections on crowd regions are left out.

        Source: the kinds of errors follow TIDE (arXiv 2008.08115), but do not compare classes before the match.
        """
        results = [each for each in self.results if each["score"] >= score]
        evaluation = self._evaluation(results, "bbox")
        params = evaluation.params
        params.useCats, params.iouThrs, params.maxDets = 0, np.array([_IOU]), [len(results)]
        params.areaRng, params.areaRngLbl = [[0, np.inf]], ["all"]
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.evaluate()
        pairs = zip(sorted(self.truth.imgs), evaluation.evalImgs, strict=True)
        return [self._sort_out(image_id, matches, results) for image_id, matches in pairs]

    def _sort_out(
        self, image_id: Any, matches: dict | None, results: Sequence[dict[str, Any]]
    ) -> ImageMatches:
        """Name the kind of each detection of an image from pycocotools' matches; detections have the ids 1, 2, ..."""
        image = ImageMatches(image_id, [], [], [], [])
        if matches is None:  # neither objects nor detections
            return image
        objects = [each for each in self.truth.imgToAnns[image_id] if not each.get("iscrowd")]
        taken = dict(
            zip(
                matches["gtMatches"][0].astype(int),
                map(self.truth.anns.get, matches["gtIds"]),
                strict=True,
            )
        )
        for number, ignored in zip(matches["dtIds"], matches["dtIgnore"][0], strict=True):
            if ignored:
                continue
            detection, match = results[number - 1], taken.get(number)
            overlaps = mask.iou(
                [detection["bbox"]], [each["bbox"] for each in objects], [0] * len(objects)
            )
            overlap = np.max(overlaps, initial=0)
            if match:
                kind = (
                    CORRECT if match["category_id"] == detection["category_id"] else WRONG_CLASS
                )
            else:
                kind = (
                    DUPLICATE
                    if overlap >= _IOU
                    else POOR_BOX
                    if overlap >= _BACKGROUND_IOU
                    else BACKGROUND
                )
            image.found.append(detection)
            image.kinds.append(kind)
            image.matched.append(match)
        hit = {id(each) for each in image.matched}
        image.missed.extend(each for each in objects if id(each) not in hit)
        return image

    def draw(
        self, image_id: Any, objects: Sequence[dict[str, Any]], notes: Sequence[str]
    ) -> np.ndarray:
        """Draw annotations or detections on their image, with notes."""
        index = {category: index for index, category in enumerate(self.category_ids)}
        hidden = {key for task, key in RESULT_KEYS.items() if task not in self.tasks}
        shown = [
            {key: value for key, value in each.items() if key not in hidden}
            | {"category_id": index[each["category_id"]]}
            for each in objects
        ]
        for each in shown:
            if isinstance(
                mask := each.get("segmentation"), list
            ):  # Detectron2 leaves out other polygons, too
                each["segmentation"] = list(filter(is_polygon, mask))
        image = read_image(
            self.records[image_id]["file_name"], "RGB", self.cfg.INPUT.PERCENTILES
        )
        return draw_record(image, self.metadata, {"annotations": shown}, notes)
