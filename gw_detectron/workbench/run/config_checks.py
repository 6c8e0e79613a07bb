"""All pre-run checks in their order, and the checks of the config."""

import importlib.util
import math

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultTrainer
from detectron2.modeling import GeneralizedRCNN, PanopticFPN
from detectron2.utils import comm
from torch import nn

from ...errors import ConfigError, PreflightReport, first_line
from ...weights import LazyCheckpoint, trained_classes
from ..dataset.dataset_checks import check_datasets, wrong_evaluator
from ..dataset.fingerprint import Fingerprint
from ..images.augmentations import build_augmentations
from .model_checks import check_model, check_start_weights

# task -> scores that Detectron2 logs; small objects have no keypoints
_SCORES = dict.fromkeys(("bbox", "segm"), ("AP", "AP50", "AP75", "APs", "APm", "APl")) | {
    "keypoints": ("AP", "AP50", "AP75", "APm", "APl"),
    "sem_seg": ("mIoU", "fwIoU", "mACC", "pACC"),
    "panoptic_seg": tuple(
        f"{score}{part}" for part in ("", "_th", "_st") for score in ("PQ", "SQ", "RQ")
    ),
}


def preflight(
    cfg: CfgNode,
    start: LazyCheckpoint,
    report: PreflightReport | None = None,
    *,
    eval_only: bool = False,
    allow_partial: bool = False,
    own_evaluator: bool = False,
) -> PreflightReport:
    """Find what would stop a run after hours, or let it train to nothing.

    Values that Detectron2 refuses at once are left to it. Remote weights are fetched last, and only if there is no
    error. Nothing is written. With ``allow_partial`` the user accepts weights that do not fit; with ``own_evaluator``
    the trainer overrides ``build_evaluator``. The ``report`` is extended and returned.
    """
    report = report or PreflightReport()
    _check_device(cfg.MODEL.DEVICE, report)
    if not eval_only:
        if cfg.SOLVER.AMP.ENABLED and cfg.MODEL.DEVICE == "cpu":
            report.errors.append(
                "SOLVER.AMP.ENABLED (True): Detectron2 needs a GPU for it. Fix: set it to False."
            )
        _check_schedule(cfg, report)
        try:
            build_augmentations(cfg)
        except ConfigError as error:
            report.errors.append(str(error))
        cfg = DefaultTrainer.auto_scale_workers(
            cfg, comm.get_world_size()
        )  # as the trainer does
    elif not (start.address or start.error):
        report.errors.append(
            "--eval-only: no weights to evaluate. Fix: set MODEL.WEIGHTS to a checkpoint, or OUTPUT_DIR to the folder "
            f"of a run and add --resume (now '{cfg.OUTPUT_DIR}')."
        )
    model = check_model(cfg, start, report, eval_only=eval_only)
    _check_evaluation(cfg, model, report)
    texts = {
        key: cfg.DATASETS[key]
        for key in ("TRAIN", "TEST")
        if isinstance(cfg.DATASETS[key], str)
    }
    for key, name in texts.items():
        report.errors.append(
            f"DATASETS.{key} ({name!r}): a text instead of a tuple. Fix: write ({name!r},)."
        )
    trained = trained_classes(start.opened) if eval_only or start.resumed else None
    data = {} if texts else check_datasets(cfg, report, eval_only=eval_only, trained=trained)
    if not (texts or own_evaluator):
        registered = [name for name in cfg.DATASETS.TEST if name in DatasetCatalog]
        report.errors += filter(None, (wrong_evaluator(cfg, name) for name in registered))
    if not eval_only:
        _check_kept_weights(cfg, report, None if own_evaluator else data)
    if not report.errors:
        start.fetch()
    if start.unfetched:
        report.unchecked = f"MODEL.WEIGHTS ('{start.address}'): not fetched or checked until this is corrected."
    check_start_weights(cfg, start, model, report, allow_partial=allow_partial)
    return report


def _check_device(device: str, report: PreflightReport) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error).partition(". ")[0]
        report.errors.append(
            f"MODEL.DEVICE ('{device}'): torch cannot use it: {reason}. Fix: set it to cpu, or give --num-gpus 0."
        )


def _check_schedule(cfg: CfgNode, report: PreflightReport) -> None:
    """Check that the learning rate lets the model learn."""
    solver = cfg.SOLVER
    if not 0 < solver.BASE_LR < math.inf:
        report.errors.append(
            f"SOLVER.BASE_LR ({solver.BASE_LR}): nothing would be learned. Fix: give e.g. 0.02."
        )
    for key in ("CHECKPOINT_PERIOD", "ACCUMULATE"):
        if solver[key] < 1:
            report.errors.append(
                f"SOLVER.{key} ({solver[key]}): not 1 or more. Fix: set it, or leave it out."
            )
    if "Step" in solver.LR_SCHEDULER_NAME and any(
        step >= solver.MAX_ITER for step in solver.STEPS
    ):
        report.errors.append(
            f"SOLVER.STEPS ({tuple(solver.STEPS)}): the run ends before a step (SOLVER.MAX_ITER {solver.MAX_ITER}). "
            'Fix: set earlier steps, or "()" for a constant learning rate.'
        )
    if solver.WARMUP_ITERS >= solver.MAX_ITER:
        report.warnings.append(
            f"SOLVER.WARMUP_ITERS ({solver.WARMUP_ITERS}): the run ends (SOLVER.MAX_ITER {solver.MAX_ITER}) before the "
            "learning rate reaches SOLVER.BASE_LR. Fix: lower it."
        )


def _check_kept_weights(
    cfg: CfgNode, report: PreflightReport, data: dict[str, Fingerprint] | None
) -> None:
    """Check the keys that decide which weights are kept, and when the training ends; None: scores are not known."""
    decay, best, period, patience = (
        cfg.SOLVER.EMA,
        cfg.TEST.BEST,
        cfg.TEST.EVAL_PERIOD,
        cfg.TEST.PATIENCE,
    )
    if not 0 <= decay < 1:
        report.errors.append(
            f"SOLVER.EMA ({decay}): not from 0 to below 1. Fix: give e.g. 0.999, or 0.0 for none."
        )
    if patience and not best:
        report.errors.append(
            f"TEST.PATIENCE ({patience}): TEST.BEST names no score. Fix: set it, e.g. bbox/AP."
        )
    if best and (period <= 0 or not cfg.DATASETS.TEST):
        report.errors.append(
            f"TEST.BEST ('{best}'): needs evaluations during the training; TEST.EVAL_PERIOD is {period}, DATASETS.TEST "
            f"{cfg.DATASETS.TEST}. Fix: set both, or TEST.BEST ''."
        )
    elif best and data is not None and best not in (scores := _score_names(cfg, data)):
        report.errors.append(
            f"TEST.BEST ('{best}'): not a score of the evaluation. Fix: give one of {', '.join(scores)}."
        )


def _score_names(cfg: CfgNode, data: dict[str, Fingerprint]) -> list[str]:
    """List the scores that an evaluation logs: dataset (of several), task, score."""
    kind = cfg.MODEL.META_ARCHITECTURE
    objects, semantic = (
        kind != "SemanticSegmentor",
        kind in ("SemanticSegmentor", "PanopticFPN"),
    )
    tasks = {
        "bbox": objects,
        "segm": objects and cfg.MODEL.MASK_ON,
        "keypoints": objects and cfg.MODEL.KEYPOINT_ON,
    }
    tasks |= {
        "sem_seg": semantic,
        "panoptic_seg": kind == "PanopticFPN" and importlib.util.find_spec("panopticapi"),
    }
    names = []
    for dataset in cfg.DATASETS.TEST:
        prefix = f"{dataset}/" if len(cfg.DATASETS.TEST) > 1 else ""
        classes = MetadataCatalog.get(dataset).get("thing_classes") or []
        for task in filter(tasks.get, tasks):
            dense = (
                data[dataset].dense_score(task, cfg.TEST.DETECTIONS_PER_IMAGE)
                if dataset in data
                else ""
            )
            more = ([dense] if dense else []) + (
                [f"AP-{name}" for name in classes] if len(classes) > 1 else []
            )
            scores = (*_SCORES[task], *more) if "AP" in _SCORES[task] else _SCORES[task]
            names += [f"{prefix}{task}/{score}" for score in scores]
    return [*names, "validation/total_loss"] if cfg.TEST.LOSS else names


def _check_evaluation(cfg: CfgNode, model: nn.Module | None, report: PreflightReport) -> None:
    """Check what would stop an evaluation, perhaps after a whole training."""
    keypoints = cfg.MODEL.KEYPOINT_ON
    # GeneralizedRCNNWithTTA refuses other models, and leaves out predictions of PanopticFPN
    augmentable = model is None or (
        isinstance(model, GeneralizedRCNN) and not isinstance(model, PanopticFPN)
    )
    if cfg.TEST.AUG.ENABLED and (keypoints or not augmentable):
        report.errors.append(
            f"TEST.AUG.ENABLED (True): Detectron2 has no test-time augmentation for {cfg.MODEL.META_ARCHITECTURE} or "
            "MODEL.KEYPOINT_ON. Fix: set it to False."
        )
    sigmas, points = cfg.TEST.KEYPOINT_OKS_SIGMAS, cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    if keypoints and len(sigmas) != points and (sigmas or points != 17):
        report.errors.append(
            f"TEST.KEYPOINT_OKS_SIGMAS ({len(sigmas)} values): MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}. Fix: "
            "give one sigma per keypoint."
        )
