"""The report of the pre-run checks, and the checks of device, schedule, evaluation and output folder."""

import glob
import importlib.util
import math
import os
import shlex
from dataclasses import dataclass, field

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.modeling import GeneralizedRCNN, PanopticFPN
from torch import nn

from ..checkpoint import StartWeights
from ..checkpoint.opening import BEST_CHECKPOINT
from ..errors import PreflightError

_AREAS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
_KEYPOINT_SCORES = ("AP", "AP50", "AP75", "APm", "APl")  # small objects have no keypoints
_SEMANTIC_SCORES = ("mIoU", "fwIoU", "mACC", "pACC")
_PANOPTIC_SCORES = tuple(f"{score}{part}" for part in ("", "_th", "_st") for score in ("PQ", "SQ", "RQ"))


@dataclass
class PreflightReport:
    """Errors and warnings found before a run; ``unchecked`` is what was left out because of the errors."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: str = ""

    def raise_errors(self) -> None:
        """Raise :class:`PreflightError` if there is an error."""
        if self.errors:
            raise PreflightError(self.errors, self.unchecked)


def check_device(cfg: CfgNode, report: PreflightReport) -> None:
    """Check that there is a GPU if one is needed."""
    if cfg.MODEL.DEVICE != "cpu" and not torch.cuda.is_available():
        report.errors.append(
            f"MODEL.DEVICE ('{cfg.MODEL.DEVICE}'): torch finds no GPU here. Fix: set MODEL.DEVICE cpu, or give "
            "--num-gpus 0."
        )


def check_schedule(cfg: CfgNode, report: PreflightReport) -> None:
    """Check that the learning rate lets the model learn."""
    solver = cfg.SOLVER
    if not 0 < solver.BASE_LR < math.inf:
        report.errors.append(f"SOLVER.BASE_LR ({solver.BASE_LR}): nothing would be learned. Fix: give e.g. 0.02.")
    if solver.WARMUP_ITERS >= solver.MAX_ITER:
        report.warnings.append(
            f"SOLVER.WARMUP_ITERS ({solver.WARMUP_ITERS}): SOLVER.MAX_ITER ({solver.MAX_ITER}) ends the run before it "
            "reaches SOLVER.BASE_LR. Fix: lower it."
        )


def check_kept_weights(cfg: CfgNode, report: PreflightReport) -> None:
    """Check the keys that decide which weights are kept, and when the training ends. Datasets are registered."""
    decay, best, period, patience = cfg.SOLVER.EMA, cfg.TEST.BEST, cfg.TEST.EVAL_PERIOD, cfg.TEST.PATIENCE
    if not 0 <= decay < 1:
        report.errors.append(f"SOLVER.EMA ({decay}): not from 0 to below 1. Fix: give e.g. 0.999, or 0 for no average.")
    if patience < 0 or (patience and not best):
        report.errors.append(
            f"TEST.PATIENCE ({patience}): a number of evaluations without a better TEST.BEST ({best!r}). Fix: set "
            "TEST.BEST, e.g. bbox/AP, or TEST.PATIENCE 0."
        )
    if not best:
        return
    if period <= 0 or not cfg.DATASETS.TEST:
        report.errors.append(
            f"TEST.BEST ('{best}'): needs evaluations during the training; TEST.EVAL_PERIOD is {period}, DATASETS.TEST "
            f"{cfg.DATASETS.TEST}. Fix: set both, or TEST.BEST ''."
        )
    scores = _score_names(cfg)
    if best not in scores:
        report.errors.append(
            f"TEST.BEST ('{best}'): the evaluation does not give this score. It gives {', '.join(scores)}. Fix: give "
            "one of them."
        )


def _score_names(cfg: CfgNode) -> list[str]:
    """List the scores that an evaluation logs: dataset (of several), task, score."""
    architecture = cfg.MODEL.META_ARCHITECTURE
    scores: dict[str, tuple[str, ...]] = {}
    if architecture != "SemanticSegmentor":
        tasks = {"bbox": True, "segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
        scores = {task: _KEYPOINT_SCORES if task == "keypoints" else _AREAS for task, on in tasks.items() if on}
    if architecture in ("SemanticSegmentor", "PanopticFPN"):
        scores["sem_seg"] = _SEMANTIC_SCORES
    if architecture == "PanopticFPN" and importlib.util.find_spec("panopticapi"):
        scores["panoptic_seg"] = _PANOPTIC_SCORES
    names = []
    for dataset in cfg.DATASETS.TEST:
        prefix = f"{dataset}/" if len(cfg.DATASETS.TEST) > 1 else ""
        classes = MetadataCatalog.get(dataset).get("thing_classes") or []
        for task, found in scores.items():
            per_class = [f"AP-{name}" for name in classes] if "AP" in found and len(classes) > 1 else []
            names += [f"{prefix}{task}/{score}" for score in (*found, *per_class)]
    return [*names, "validation/total_loss"] if cfg.TEST.LOSS else names


def check_evaluation(cfg: CfgNode, model: nn.Module | None, report: PreflightReport) -> None:
    """Check what would stop an evaluation, perhaps after a whole training."""
    keypoints = cfg.MODEL.KEYPOINT_ON
    # GeneralizedRCNNWithTTA refuses other models, and leaves out predictions of PanopticFPN
    augmentable = model is None or (isinstance(model, GeneralizedRCNN) and not isinstance(model, PanopticFPN))
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


def check_output_folder(
    cfg: CfgNode,
    start: StartWeights,
    report: PreflightReport,
    *,
    eval_only: bool,
    resume: bool,
    overwrite: bool,
    config_file: str,
) -> None:
    """Check that the run finds the checkpoints that it needs, and overwrites none by accident."""
    folder, moved_to = cfg.OUTPUT_DIR, os.path.dirname(config_file) or "."
    if start.resumed:
        if start.error:
            reason = str(start.error).partition(" Fix: ")[0]
            report.errors.append(f"{reason} Fix: {_another_checkpoint(folder, start.address)}")
        return
    if resume and _checkpoints(folder):
        report.errors.append(
            f"--resume: file not found: '{os.path.join(folder, 'last_checkpoint')}', which names the checkpoint to "
            f"continue from. Fix: {_another_checkpoint(folder)}"
        )
    elif resume and config_file and os.path.isfile(os.path.join(moved_to, "last_checkpoint")):
        report.errors.append(
            f"--resume: no checkpoint in OUTPUT_DIR ('{folder}'), but in the folder of the config. Fix: add OUTPUT_DIR "
            f"{shlex.quote(moved_to)} to continue that run."
        )
    elif resume and not eval_only:
        report.warnings.append(f"--resume: no checkpoint in '{folder}'. The run starts from its beginning.")
    elif os.path.isfile(os.path.join(folder, "last_checkpoint")) and not (eval_only or overwrite):
        report.errors.append(
            f"OUTPUT_DIR ('{folder}'): contains checkpoints of an earlier run. Fix: continue it with --resume, keep "
            "both with another OUTPUT_DIR, or replace it with --overwrite."
        )
    if not start.address and eval_only:
        report.errors.append(
            "--eval-only: no weights to evaluate. Fix: set MODEL.WEIGHTS to a checkpoint, or OUTPUT_DIR to the folder "
            f"of a run and add --resume (now '{folder}')."
        )


def _another_checkpoint(folder: str, damaged: str = "") -> str:
    """Say how to continue without the last checkpoint or its name."""
    others = [
        path
        for path in _checkpoints(folder)
        if os.path.basename(path) not in (BEST_CHECKPOINT, os.path.basename(damaged))
    ]
    if not others:
        return "start again with --overwrite instead of --resume; there is no other checkpoint."
    return f"write {os.path.basename(others[0])}, the newest other checkpoint, into {folder}/last_checkpoint."


def _checkpoints(folder: str) -> list[str]:
    """List the checkpoints of an output folder, newest first."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.pth")), key=os.path.getmtime, reverse=True)
