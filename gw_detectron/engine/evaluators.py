"""The evaluators of a dataset: COCO's boxes, masks and keypoints, semantic and panoptic segmentation."""

import importlib.util
import logging
import os

from detectron2.config import CfgNode
from detectron2.evaluation import (
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    SemSegEvaluator,
)

from ..errors import ConfigError
from ..installation import has_compiled_operators
from ..preflight import wrong_evaluator

log = logging.getLogger(__name__)

#: main scores that they log: of boxes, masks and keypoints; semantic; panoptic segmentation
MAIN_SCORES = ("AP", "mIoU", "PQ")


def build_evaluator(cfg: CfgNode, dataset_name: str, output_folder: str | None = None) -> DatasetEvaluator:
    """Build the evaluators of what a model predicts.

    Args:
        cfg: the config, whose ``META_ARCHITECTURE``, ``MASK_ON`` and ``KEYPOINT_ON`` select the tasks.
        dataset_name: a registered dataset.
        output_folder: folder of the predictions; ``inference`` in ``OUTPUT_DIR`` if None.

    Raises:
        ConfigError: there is no evaluator for the dataset or for the model's predictions.
    """
    if problem := wrong_evaluator(cfg, dataset_name):
        raise ConfigError(problem)
    folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
    architecture = cfg.MODEL.META_ARCHITECTURE
    if architecture == "SemanticSegmentor":
        return SemSegEvaluator(dataset_name, output_dir=folder)
    tasks = {"bbox": True, "segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
    objects = COCOEvaluator(
        dataset_name,
        tasks=tuple(task for task, wanted in tasks.items() if wanted),
        output_dir=folder,
        use_fast_impl=has_compiled_operators(),
        kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS,
    )
    if architecture != "PanopticFPN":
        return objects
    evaluators = [objects, SemSegEvaluator(dataset_name, output_dir=folder)]
    if importlib.util.find_spec("panopticapi"):
        evaluators.append(COCOPanopticEvaluator(dataset_name, folder))
    else:
        log.warning(
            "panopticapi is not installed: panoptic quality (PQ) is not computed, only its parts. "
            "Fix: pip install git+https://github.com/cocodataset/panopticapi.git"
        )
    return DatasetEvaluators(evaluators)
