"""Evaluation on the validation data: COCO's scores, also beyond its limits, and the losses."""

import contextlib
import copy
import io
import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
from ..dataset.source import own_source
from ..images import ImageNamingMapper
from .folder import CONVERTED, VALIDATION_PREFIX
from .randomness import VALIDATION, seed_generators

log = logging.getLogger(__name__)

# RetinaNet's, and up to v0.6 FCOS's: a running mean that scales the loss, outside of the state dict
LOSS_NORMALIZER = "loss_normalizer"
TOTAL_LOSS = f"{VALIDATION_PREFIX}total_loss"


class DenseCOCOEvaluator(COCOEvaluator):
    """Detectron2's COCOEvaluator, with a second AP for images of many objects.

    It is that of :meth:`Fingerprint.dense_score`.
    """

    def __init__(self, dataset_name: str, detections: int, **options: Any) -> None:
        super().__init__(dataset_name, **options)
        drop_info(self._coco_api)
        # faster-coco-eval takes only integers
        keys = (*self._coco_api.imgs, *self._coco_api.cats)
        self._use_fast_impl &= all(isinstance(key, int) for key in keys)
        source = own_source(dataset_name)  # whose fingerprint the checks have made
        self._fingerprint = (
            source.fingerprint if source else read_fingerprint(self._coco_api.dataset)
        )
        self._detections = detections

    def _derive_coco_results(
        self, coco_eval: Any, iou_type: str, class_names: Sequence[str] | None = None
    ) -> dict:
        results = super()._derive_coco_results(coco_eval, iou_type, class_names)

        name = self._fingerprint.dense_score(iou_type, self._detections)
        if name and coco_eval is not None:
            results[name] = dense_average_precision(coco_eval, name)
            log.info(
                "%s: images have up to %d objects of a class. AP, as COCO defines it, counts %d "
                "detections per image and class: %.3f. %s counts more: %.3f.",
                iou_type,
                self._fingerprint.most_of_a_class,
                coco_eval.params.maxDets[-1],
                results["AP"],
                name,
                results[name],
            )
        return results


def drop_info(truth: Any) -> None:
    """Empty the ``info`` of a COCO object.

    pycocotools copies it for nothing, which fails if it is deeply nested; 2.0.9 and 2.0.10 also need one.
    """
    truth.dataset["info"] = {}


def dense_average_precision(evaluation: Any, name: str) -> float:
    """Return the score ``name``, an AP@N, of an evaluation in percent."""
    # anew: a second evaluate() of one object has a wrong AP in faster-coco-eval 1.6
    truth, detections = evaluation.cocoGt, evaluation.cocoDt
    dense = type(evaluation)(truth, detections, evaluation.params.iouType)
    dense.params = copy.copy(evaluation.params)
    dense.params.maxDets = [int(name.partition("@")[2])]
    with contextlib.redirect_stdout(io.StringIO()):
        dense.evaluate()
        dense.accumulate()

    precision = dense.eval["precision"][:, :, :, 0, 0]  # of IoU, recall and class
    return 100 * float(precision[precision > -1].mean())


def build_coco_evaluator(name: str, folder: str, **options: Any) -> DenseCOCOEvaluator:
    """Build the evaluator of objects.

    The records of a Python function are converted anew, not taken from an earlier file.
    """
    source = own_source(name)
    if source is not None:
        source.write()
    metadata = MetadataCatalog.get(name)
    is_converted = metadata.get("json_file", CONVERTED).endswith(CONVERTED)
    if is_converted:
        vars(metadata).pop("json_file", None)
        with _keypoints_kept(DatasetCatalog.get(name)):
            file = os.path.join(folder, f"{name}{CONVERTED}")
            convert_to_coco_json(name, file, allow_cached=False)
        metadata.json_file = file  # else Detectron2 warns of a cached file

    evaluator = DenseCOCOEvaluator(name, output_dir=folder, **options)
    if is_converted:
        del metadata.json_file
    return evaluator


@contextlib.contextmanager
def _keypoints_kept(records: Sequence[dict]) -> Iterator[None]:
    """Restore the keypoints of records, which Detectron2's conversion moves by half a pixel."""
    annotations = [
        annotation
        for record in records
        for annotation in record.get("annotations", ())
        if annotation.get("keypoints")
    ]
    keypoints = [list(annotation["keypoints"]) for annotation in annotations]
    yield
    for annotation, points in zip(annotations, keypoints, strict=True):
        annotation["keypoints"] = points


def validation_losses(cfg: CfgNode, model: nn.Module, seed: int) -> dict[str, float]:
    """Compute the mean losses of the images in ``DATASETS.TEST``, resized as in evaluation.

    Norms use their running statistics. The model is not changed.

    Args:
        model: the detector, not its ``DistributedDataParallel``.
        seed: of sampled anchors and regions.

    Returns:
        ``validation/loss_cls`` and so on, and their sum ``validation/total_loss``; {} without
        annotations.
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

    seed_generators(seed, VALIDATION, comm.get_rank())
    attributes = vars(model)
    normalizer = {
        name: attributes[name] for name in [LOSS_NORMALIZER] if name in attributes
    }
    sums: dict[str, float] = defaultdict(float)
    with _computing_losses(model), no_grad(), EventStorage(1):
        for batch in data:
            for name, loss in model(batch).items():
                sums[name] += float(loss)
            # each image as if it came next
            attributes.pop(LOSS_NORMALIZER, None)
            attributes.update(normalizer)

    totals: dict[str, float] = defaultdict(float)
    for part in comm.all_gather(sums):  # of all processes; one may have no image
        for name, value in part.items():
            totals[name] += value
    means = {
        VALIDATION_PREFIX + name: value / len(records) for name, value in totals.items()
    }
    return {**means, TOTAL_LOSS: sum(means.values())}


@contextlib.contextmanager
def _computing_losses(model: nn.Module) -> Iterator[None]:
    """Set a model to training mode, but its norms to evaluation mode; restore all modes."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.train()
        for module in modes:
            if norm_spec(module) is not None:
                module.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
