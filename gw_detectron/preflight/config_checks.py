"""The report of the pre-run checks, and the checks of device, schedule, evaluation and output folder."""

import glob
import math
import os
import shlex
from dataclasses import dataclass, field

import torch
from detectron2.config import CfgNode
from detectron2.modeling import GeneralizedRCNN, PanopticFPN
from torch import nn

from ..checkpoint import StartWeights
from ..errors import PreflightError


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
    others = [path for path in _checkpoints(folder) if path != damaged]
    if not others:
        return "start again with --overwrite instead of --resume; there is no other checkpoint."
    return f"write {os.path.basename(others[0])}, the newest other checkpoint, into {folder}/last_checkpoint."


def _checkpoints(folder: str) -> list[str]:
    """List the checkpoints of an output folder, newest first."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "*.pth")), key=os.path.getmtime, reverse=True)
