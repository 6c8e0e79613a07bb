"""All pre-run checks in their order, and the checks of the config."""

import importlib.util
import math
from collections.abc import Mapping, Sequence

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultTrainer
from detectron2.modeling import GeneralizedRCNN, PanopticFPN
from detectron2.utils import comm
from torch import nn

from ...errors import CheckReport, ConfigError, first_line
from ...weights import LazyCheckpoint, trained_classes
from ..dataset.coco_scores import COCO_TASKS, coco_tasks
from ..dataset.dataset_checks import check_datasets, wrong_evaluator
from ..dataset.fingerprint import Fingerprint
from ..images.augmentations import build_augmentations
from .evaluation import TOTAL_LOSS
from .model_checks import check_model, check_start_weights

# task -> scores that Detectron2 logs
_SCORES = {name: task.scores for name, task in COCO_TASKS.items()} | {
    "sem_seg": ("mIoU", "fwIoU", "mACC", "pACC"),
    "panoptic_seg": tuple(
        f"{score}{part}" for part in ("", "_th", "_st") for score in ("PQ", "SQ", "RQ")
    ),
}


def check_run(
    cfg: CfgNode,
    start: LazyCheckpoint,
    report: CheckReport | None = None,
    *,
    eval_only: bool = False,
    allow_partial: bool = False,
    own_evaluator: bool = False,
) -> CheckReport:
    """Find what would stop a run after hours, or let it train to nothing; add it to the report.

    Values that Detectron2 refuses at once are left to it. Remote weights are fetched last, and only if there is no
    error. Nothing is written. With ``allow_partial`` the user accepts weights that do not fit; with ``own_evaluator``
    the trainer overrides ``build_evaluator``.
    """
    report = report or CheckReport()
    _check_device(cfg.MODEL.DEVICE, report)
    if eval_only:
        if not (start.address or start.error):
            report.errors.append(
                "gw-detectron eval: no weights to evaluate. Fix: give a RUN, or set MODEL.WEIGHTS to a checkpoint, or "
                f"OUTPUT_DIR (now '{cfg.OUTPUT_DIR}') to the folder of a run and add --resume."
            )
    else:
        cfg = _check_training(cfg, report)

    model = check_model(cfg, start, report, eval_only=eval_only)
    _check_evaluation(cfg, model, report)

    trained = trained_classes(start.opened) if eval_only or start.resumed else None
    fingerprints = check_datasets(cfg, report, eval_only=eval_only, trained=trained)
    if not own_evaluator:
        for name in cfg.DATASETS.TEST:
            problem = wrong_evaluator(cfg, name) if name in DatasetCatalog else ""
            if problem:
                report.errors.append(problem)
    if not eval_only:
        _check_kept_weights(cfg, fingerprints, report, own_evaluator=own_evaluator)

    if not report.errors:
        start.fetch()
    if start.unfetched:
        report.unchecked = f"MODEL.WEIGHTS ('{start.address}'): not fetched or checked until this is corrected."
    check_start_weights(
        cfg, start, model, report, eval_only=eval_only, allow_partial=allow_partial
    )
    return report


def device_problem(device: str) -> str:
    """Say why torch cannot use a device, or ""."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return first_line(error).partition(". ")[0]
    return ""


def _check_device(device: str, report: CheckReport) -> None:
    reason = device_problem(device)
    if reason:
        report.errors.append(
            f"MODEL.DEVICE ('{device}'): torch cannot use it: {reason}. Fix: set it to cpu, or give --num-gpus 0."
        )


def _check_training(cfg: CfgNode, report: CheckReport) -> CfgNode:
    """Check the keys of a training; return the config with batch and schedule as the trainer scales them."""
    if cfg.OUTPUT_DIR.encode(errors="ignore").decode() != cfg.OUTPUT_DIR:
        report.errors.append(
            f"OUTPUT_DIR ('{cfg.OUTPUT_DIR}'): not UTF-8, which TensorBoard needs. Fix: give another."
        )
    if "?" in cfg.OUTPUT_DIR:
        report.errors.append(
            f"OUTPUT_DIR ('{cfg.OUTPUT_DIR}'): '?' begins options of an address. Fix: give another."
        )

    _check_schedule(cfg, report)
    try:
        build_augmentations(cfg)
    except ConfigError as error:
        report.errors.append(str(error))

    reference, batch = cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.SOLVER.IMS_PER_BATCH
    if reference and batch % reference:
        report.errors.append(
            f"SOLVER.REFERENCE_WORLD_SIZE ({reference}): SOLVER.IMS_PER_BATCH ({batch}) is not a multiple of it. "
            "Fix: set it to 0, for the batch and the schedule as they are, or correct one of the two."
        )
        return cfg
    return DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())


def _check_schedule(cfg: CfgNode, report: CheckReport) -> None:
    """Check that the learning rate lets the model learn."""
    solver = cfg.SOLVER
    if solver.AMP.ENABLED and cfg.MODEL.DEVICE == "cpu":
        report.errors.append(
            "SOLVER.AMP.ENABLED (True): Detectron2 needs a GPU for it. Fix: set it to False."
        )

    if not 0 < solver.BASE_LR < math.inf:
        report.errors.append(
            f"SOLVER.BASE_LR ({solver.BASE_LR}): nothing would be learned. Fix: give e.g. 0.02."
        )

    lowest = {"MAX_ITER": 1, "CHECKPOINT_PERIOD": 1, "ACCUMULATE": 1, "KEEP": 0}
    for key, least in lowest.items():
        if solver[key] < least:
            report.errors.append(
                f"SOLVER.{key} ({solver[key]}): not {least} or more. Fix: set it, or leave it out."
            )

    has_steps = "Step" in solver.LR_SCHEDULER_NAME
    late = [step for step in solver.STEPS if step >= solver.MAX_ITER]
    if has_steps and late:
        report.warnings.append(
            f"SOLVER.STEPS ({tuple(solver.STEPS)}): the run ends (SOLVER.MAX_ITER {solver.MAX_ITER}) before "
            f"{len(late)} of its steps, so the learning rate decays less. Fix: set earlier steps."
        )

    if solver.WARMUP_ITERS >= solver.MAX_ITER:
        report.warnings.append(
            f"SOLVER.WARMUP_ITERS ({solver.WARMUP_ITERS}): the run ends (SOLVER.MAX_ITER {solver.MAX_ITER}) before the "
            "learning rate reaches SOLVER.BASE_LR. Fix: lower it."
        )


def _check_kept_weights(
    cfg: CfgNode,
    fingerprints: Mapping[str, Fingerprint],
    report: CheckReport,
    *,
    own_evaluator: bool,
) -> None:
    """Check the keys that decide which weights are kept, and when the training ends."""
    decay = cfg.SOLVER.EMA
    best = cfg.TEST.BEST
    if not 0 <= decay < 1:
        report.errors.append(
            f"SOLVER.EMA ({decay}): not from 0 to below 1. Fix: give e.g. 0.999, or 0.0 for none."
        )

    if cfg.TEST.PATIENCE and not best:
        report.errors.append(
            f"TEST.PATIENCE ({cfg.TEST.PATIENCE}): TEST.BEST names no score. Fix: set it, e.g. bbox/AP."
        )
    if best and (cfg.TEST.EVAL_PERIOD <= 0 or not cfg.DATASETS.TEST):
        report.errors.append(
            f"TEST.BEST ('{best}'): needs evaluations during the training; TEST.EVAL_PERIOD is {cfg.TEST.EVAL_PERIOD}, "
            f"DATASETS.TEST {cfg.DATASETS.TEST}. Fix: set both, or TEST.BEST ''."
        )
    elif best and not own_evaluator:
        _check_best_score(cfg, fingerprints, report)


def _check_best_score(
    cfg: CfgNode, fingerprints: Mapping[str, Fingerprint], report: CheckReport
) -> None:
    """Check that the evaluation has the score of ``TEST.BEST``, and objects for it."""
    best = cfg.TEST.BEST
    scores = _scores(cfg, fingerprints)
    if best not in scores:
        report.errors.append(
            f"TEST.BEST ('{best}'): not a score of the evaluation. Fix: give one of {', '.join(scores)}."
        )
        return

    datasets, score = scores[best]
    known = [fingerprints[name] for name in datasets if name in fingerprints]
    counts = [data.scored_objects(score) for data in known]
    if best.rpartition("/")[0].endswith("keypoints"):
        counts = [data.keypoints.sum() for data in known]

    if known and not any(counts):
        report.errors.append(
            f"TEST.BEST ('{best}'): {', '.join(datasets)} has no object that it counts, so it is never a number. "
            "Fix: give a score of objects that are there."
        )


def _scores(
    cfg: CfgNode, fingerprints: Mapping[str, Fingerprint]
) -> dict[str, tuple[Sequence[str], str]]:
    """Return datasets and score by the names that an evaluation logs: dataset (of several), task, score."""
    found: dict[str, tuple[Sequence[str], str]] = {}
    for dataset in cfg.DATASETS.TEST:
        prefix = f"{dataset}/" if len(cfg.DATASETS.TEST) > 1 else ""
        classes = MetadataCatalog.get(dataset).get("thing_classes") or []
        for task in _tasks(cfg):
            scores = list(_SCORES[task])
            if "AP" in scores and len(classes) > 1:
                scores += [f"AP-{name}" for name in classes]

            if "AP" in scores and dataset in fingerprints:
                detections = cfg.TEST.DETECTIONS_PER_IMAGE
                scores.append(fingerprints[dataset].dense_score(task, detections))
            for score in filter(None, scores):
                found[f"{prefix}{task}/{score}"] = ((dataset,), score)
    if cfg.TEST.LOSS:
        found[TOTAL_LOSS] = (cfg.DATASETS.TEST, "")
    return found


def _tasks(cfg: CfgNode) -> list[str]:
    """Return the tasks that a model is evaluated on."""
    kind = cfg.MODEL.META_ARCHITECTURE
    tasks = [] if kind == "SemanticSegmentor" else [*coco_tasks(cfg)]
    if kind in ("SemanticSegmentor", "PanopticFPN"):
        tasks.append("sem_seg")
    if kind == "PanopticFPN" and importlib.util.find_spec("panopticapi"):
        tasks.append("panoptic_seg")
    return tasks


def _check_evaluation(
    cfg: CfgNode, model: nn.Module | None, report: CheckReport
) -> None:
    """Check what would stop an evaluation, perhaps after a whole training."""
    # GeneralizedRCNNWithTTA refuses other models, and leaves out predictions of PanopticFPN
    is_rcnn = isinstance(model, GeneralizedRCNN) and not isinstance(model, PanopticFPN)
    augmentable = (model is None or is_rcnn) and not cfg.MODEL.KEYPOINT_ON
    if cfg.TEST.AUG.ENABLED and not augmentable:
        report.errors.append(
            f"TEST.AUG.ENABLED (True): Detectron2 has no test-time augmentation for {cfg.MODEL.META_ARCHITECTURE} or "
            "MODEL.KEYPOINT_ON. Fix: set it to False."
        )

    sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
    points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    uses_default = not sigmas and points == 17
    if cfg.MODEL.KEYPOINT_ON and len(sigmas) != points and not uses_default:
        report.errors.append(
            f"TEST.KEYPOINT_OKS_SIGMAS ({len(sigmas)} values): MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}. Fix: "
            "give one sigma per keypoint."
        )
