"""Evaluation on the validation data: COCO's scores, also beyond its limit of detections, and the losses."""

import contextlib
import copy
import io
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
)
from detectron2.data.datasets.coco import convert_to_coco_json
from detectron2.data.detection_utils import build_augmentation
from detectron2.evaluation import COCOEvaluator
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn, no_grad

from ...norms.names import norm_spec
from ..dataset.fingerprint import read_fingerprint
from ..images import ImageNamingMapper
from .folder import CONVERTED
from .training_data import VALIDATION, seed_generators

log = logging.getLogger(__name__)

# RetinaNet's, and up to v0.6 FCOS's: a running mean that scales the loss and is not in the model's state dict
LOSS_NORMALIZER = "loss_normalizer"


class DenseCOCOEvaluator(COCOEvaluator):
    """Detectron2's COCOEvaluator, with a second AP for images of many objects, see :meth:`Fingerprint.dense_score`."""

    def __init__(self, dataset_name: str, detections: int, **options: Any) -> None:
        super().__init__(dataset_name, **options)
        # faster-coco-eval takes only integers
        self._use_fast_impl &= all(
            isinstance(key, int) for key in (*self._coco_api.imgs, *self._coco_api.cats)
        )
        self._fingerprint = read_fingerprint([{"annotations": [], **self._coco_api.dataset}])
        self._detections = detections

    def _derive_coco_results(
        self, coco_eval: Any, iou_type: str, class_names: Sequence[str] | None = None
    ) -> dict:
        results = super()._derive_coco_results(coco_eval, iou_type, class_names)
        name = self._fingerprint.dense_score(iou_type, self._detections)
        if name and coco_eval is not None:
            results[name] = dense_average_precision(coco_eval, name)
            log.info(
                "%s: images have up to %d objects of a class. AP, as COCO defines it, counts %d detections per image "
                "and class: %.3f. %s counts more: %.3f.",
                *(
                    iou_type,
                    self._fingerprint.most_of_a_class,
                    coco_eval.params.maxDets[-1],
                    results["AP"],
                ),
                *(name, results[name]),
            )
        return results


def dense_average_precision(evaluation: Any, name: str) -> float:
    """Return the score ``name``, an AP@N, of an evaluation in percent."""
    dense, dense.params = copy.copy(evaluation), copy.copy(evaluation.params)
    dense.params.maxDets = [int(name.partition("@")[2])]
    with contextlib.redirect_stdout(io.StringIO()):
        dense.evaluate()
        dense.accumulate()
    precision = dense.eval["precision"][:, :, :, 0, 0]  # of IoU, recall and class
    return 100 * float(precision[precision > -1].mean())


def build_coco_evaluator(name: str, folder: str, **options: Any) -> DenseCOCOEvaluator:
    """Build the evaluator of objects; convert the records of a Python function anew, not from an earlier file."""
    metadata = MetadataCatalog.get(name)
    if converts := metadata.get("json_file", CONVERTED).endswith(CONVERTED):
        vars(metadata).pop("json_file", None)
        objects = [
            each
            for record in DatasetCatalog.get(name)
            for each in record.get("annotations", ())
        ]
        kept = [(each, list(each["keypoints"])) for each in objects if each.get("keypoints")]
        convert_to_coco_json(
            name, os.path.join(folder, f"{name}{CONVERTED}"), allow_cached=False
        )
        for (
            each,
            keypoints,
        ) in kept:  # the conversion moves them by half a pixel, in the records of the function
            each["keypoints"] = keypoints
    evaluator = DenseCOCOEvaluator(name, output_dir=folder, **options)
    if converts:
        vars(metadata).pop("json_file", None)
    return evaluator


def validation_losses(cfg: CfgNode, model: nn.Module, seed: int) -> dict[str, float]:
    """Compute the mean losses of the images in ``DATASETS.TEST``, resized as in evaluation.

    Norms use their running statistics. The model, not its ``DistributedDataParallel``, is not changed. The seed is that
    of sampled anchors and regions. The losses are named ``validation/loss_cls`` and so on, their sum
    ``validation/total_loss``; without annotations there are none.
    """
    records = [
        record
        for name in cfg.DATASETS.TEST
        for record in DatasetCatalog.get(name)
        if record.get("annotations") or "sem_seg_file_name" in record
    ]
    if not records:
        return {}
    mapper = DatasetMapper(
        cfg, True, augmentations=build_augmentation(cfg, False), recompute_boxes=False
    )
    data = build_detection_test_loader(
        records,
        mapper=ImageNamingMapper(mapper, cfg.INPUT.PERCENTILES),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    modes = {module: module.training for module in model.modules()}
    normalizer = {name: value for name, value in vars(model).items() if name == LOSS_NORMALIZER}
    seed_generators(seed, VALIDATION, comm.get_rank())
    sums: dict[str, float] = defaultdict(float)
    try:
        model.train()
        for module in modes:
            if norm_spec(module) is not None:
                module.eval()
        with no_grad(), EventStorage(1):
            for batch in data:
                for name, loss in model(batch).items():
                    sums[name] += float(loss)
                vars(model).pop(LOSS_NORMALIZER, None)  # each image as if it came next
                vars(model).update(normalizer)
    finally:
        for module, mode in modes.items():
            module.training = mode
    parts = comm.all_gather(dict(sums))  # of all processes; one may have no image
    means = {
        name: sum(part.get(name, 0) for part in parts) / len(records)
        for part in parts
        for name in part
    }
    return {
        f"validation/{name}": value
        for name, value in {**means, "total_loss": sum(means.values())}.items()
    }
