"""Check the start weights of a run and their image format."""

import os
import re
from collections.abc import Sequence

from detectron2.config import CfgNode

from ..checkpoint import StartWeights, open_checkpoint
from ..checkpoint.provenance import PREPROCESSING, Preprocessing
from ..errors import UserError
from .findings import Findings

# part of an address -> preprocessing of these weights, by Detectron2's model zoo and this package
_PREPROCESSING = {
    r"^gw://": PREPROCESSING["torchvision"],
    r"/ImageNetPretrained/torchvision/": PREPROCESSING["torchvision"],
    r"/ImageNetPretrained/MSRA/": PREPROCESSING["detectron2-msra"],
    r"/ImageNetPretrained/FAIR/R-": PREPROCESSING["detectron2-fair"],
    r"^detectron2://.*/FAIR/X-": PREPROCESSING["detectron2-fair-resnext"],
}


def check_weights(cfg: CfgNode, start: StartWeights, findings: Findings, *, eval_only: bool, resume: bool) -> None:
    """Check that the start weights can be read and fit the config.

    ``INPUT.FORMAT``, ``PIXEL_MEAN`` and ``PIXEL_STD`` must be those of their training.

    Args:
        cfg: the config.
        start: the opened weights, or the error of opening them.
        findings: problems and warnings are added.
        eval_only: the run evaluates only.
        resume: the user asked to resume.
    """
    if start.resumed:
        if start.error:
            reason = str(start.error).partition(" Fix: ")[0]
            findings.problems.append(f"{reason} Fix: {_other_checkpoint(cfg.OUTPUT_DIR, start.address)}")
        return
    folder = cfg.OUTPUT_DIR
    tag = os.path.join(folder, "last_checkpoint")
    if resume and (checkpoints := _checkpoints(folder)):
        findings.problems.append(
            f"--resume: file not found: '{tag}', which names the checkpoint to continue from. Fix: write "
            f"{os.path.basename(checkpoints[0])}, the newest one, into that file, or start anew without --resume."
        )
    elif resume and not eval_only:
        findings.warnings.append(f"--resume: no checkpoint in '{folder}'. The run starts from its beginning.")
    elif os.path.isfile(tag) and not eval_only:
        findings.warnings.append(
            f"OUTPUT_DIR ('{folder}'): contains checkpoints of an earlier run, which this run overwrites. Fix: "
            "continue it with --resume, or keep both with another OUTPUT_DIR."
        )
    if start.error:
        findings.problems.append(str(start.error))
    elif not start.address and eval_only:
        fix = "--resume for the last checkpoint of OUTPUT_DIR"
        if resume:
            fix = f"OUTPUT_DIR to the folder of a run; there is no checkpoint in '{folder}'"
        findings.problems.append(
            f"--eval-only: no weights to evaluate. Fix: set MODEL.WEIGHTS to a checkpoint, or {fix}."
        )
    recorded = start.opened and start.opened.preprocessing
    expected = [images for pattern, images in _PREPROCESSING.items() if re.search(pattern, start.address)]
    for images in [recorded] if recorded else expected:
        _check_preprocessing(cfg, images, findings)


def _other_checkpoint(folder: str, last: str) -> str:
    for path in _checkpoints(folder):
        try:
            if path != last and open_checkpoint(path):
                name = os.path.basename(path)
                return f"write {name}, the newest undamaged checkpoint, into {folder}/last_checkpoint."
        except (UserError, OSError):
            continue
    return f"delete {folder}/last_checkpoint to start anew; there is no other undamaged checkpoint."


def _checkpoints(folder: str) -> list[str]:
    """List the checkpoints of an output folder, newest first."""
    if not os.path.isdir(folder):
        return []
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth")]
    return sorted(paths, key=os.path.getmtime, reverse=True)


def _check_preprocessing(cfg: CfgNode, images: Preprocessing, findings: Findings) -> None:
    wrong = []
    if images.input_format != cfg.INPUT.FORMAT:
        wrong.append(f"INPUT.FORMAT {images.input_format}")
    for key, wanted in (("PIXEL_MEAN", images.pixel_mean), ("PIXEL_STD", images.pixel_std)):
        if not _close(cfg.MODEL[key], wanted):
            wrong.append(f'MODEL.{key} "{list(wanted)}"')
    if cfg.MODEL.RESNETS.DEPTH >= 50 and images.stride_in_1x1 != cfg.MODEL.RESNETS.STRIDE_IN_1X1:
        wrong.append(f"MODEL.RESNETS.STRIDE_IN_1X1 {images.stride_in_1x1}")
    if wrong:
        findings.problems.append(
            f"MODEL.WEIGHTS ('{cfg.MODEL.WEIGHTS}'): trained on images of another format than this config gives. "
            f"Fix: set {', '.join(wrong)}."
        )


def _close(values: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(values) == len(wanted) and all(abs(a - b) < 0.05 for a, b in zip(values, wanted, strict=True))
