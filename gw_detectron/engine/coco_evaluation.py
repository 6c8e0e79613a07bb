"""COCO evaluation that also counts the detections beyond COCO's limit per image."""

import contextlib
import io
import logging
import os
from collections.abc import Sequence
from typing import Any

from detectron2.data import MetadataCatalog
from detectron2.data.datasets.coco import convert_to_coco_json
from detectron2.evaluation import COCOEvaluator

from ..data.fingerprint import read_fingerprint
from .output_folder import CONVERTED

log = logging.getLogger(__name__)


class DenseCOCOEvaluator(COCOEvaluator):
    """Detectron2's COCOEvaluator, with a second AP for images of many objects.

    COCO's AP counts the best 100 detections per image and class, 20 of keypoints. Where an image has N > 100 objects of
    a class, a perfect detector has less than 100 AP. The results then have ``AP@N`` beside the standard ``AP``, whose
    limit is N or, if larger, ``detections``, the model's number per image.
    """

    def __init__(self, dataset_name: str, detections: int, **options: Any) -> None:
        super().__init__(dataset_name, **options)
        found = read_fingerprint([{"annotations": [], **self._coco_api.dataset}])  # as preflight, which names AP@N
        self._most, self._detections = found.most_of_a_class, detections

    def _derive_coco_results(self, coco_eval: Any, iou_type: str, class_names: Sequence[str] | None = None) -> dict:
        results = super()._derive_coco_results(coco_eval, iou_type, class_names)
        if coco_eval is None or self._most <= (standard := coco_eval.params.maxDets[-1]):
            return results
        limit = max(self._most, self._detections)
        coco_eval.params.maxDets = [limit]
        with contextlib.redirect_stdout(io.StringIO()):
            coco_eval.evaluate()
            coco_eval.accumulate()
        precision = coco_eval.eval["precision"][:, :, :, 0, 0]  # of IoU, recall and class
        results[f"AP@{limit}"] = 100 * float(precision[precision > -1].mean())
        log.info(
            "%s: images have up to %d objects of a class. AP, as COCO defines it, counts %d detections per image and "
            "class: %.3f. With %d it is %.3f (AP@%d).",
            *(iou_type, self._most, standard, results["AP"], limit, results[f"AP@{limit}"], limit),
        )
        return results


def build_coco_evaluator(name: str, folder: str, **options: Any) -> DenseCOCOEvaluator:
    """Build the evaluator of objects; convert the records of a Python function anew, not from an earlier file."""
    metadata = MetadataCatalog.get(name)
    if converts := metadata.get("json_file", CONVERTED).endswith(CONVERTED):
        vars(metadata).pop("json_file", None)
        convert_to_coco_json(name, os.path.join(folder, f"{name}{CONVERTED}"), allow_cached=False)
    evaluator = DenseCOCOEvaluator(name, output_dir=folder, **options)
    if converts:
        vars(metadata).pop("json_file", None)
    return evaluator
