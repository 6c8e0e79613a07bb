"""Check the start weights of a run and their image format."""

import os
import re
import shlex
from collections.abc import Sequence

from detectron2.config import CfgNode
from torch import nn

from ..checkpoint import Checkpoint, StartWeights, norm_differences, norm_mismatch, open_checkpoint
from ..checkpoint.records import RUN_RECORD, config_differences
from ..errors import UserError, summarize_names
from ..weights.provenance import PREPROCESSING, Preprocessing
from .findings import Findings

# part of an address -> preprocessing of these weights, by Detectron2's model zoo and this package
_PREPROCESSING = {
    r"^gw://imagenet/": PREPROCESSING["torchvision"],
    r"/ImageNetPretrained/torchvision/": PREPROCESSING["torchvision"],
    r"/ImageNetPretrained/MSRA/": PREPROCESSING["detectron2-msra"],
    r"/ImageNetPretrained/FAIR/R-": PREPROCESSING["detectron2-fair"],
    r"^detectron2://.*/FAIR/X-": PREPROCESSING["detectron2-fair-resnext"],
}
_PREPROCESSING_KEYS = ("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "MODEL.RESNETS.STRIDE_IN_1X1")
# MODEL keys that change no result of trained weights
_HARMLESS_KEYS = ("MODEL.WEIGHTS", "MODEL.DEVICE", "MODEL.COMPILE", "MODEL.BACKBONE.FREEZE_AT")


def check_weights(
    cfg: CfgNode,
    start: StartWeights,
    findings: Findings,
    *,
    eval_only: bool,
    resume: bool,
    overwrite: bool = False,
    config_file: str = "",
) -> None:
    """Check everything about the start weights that needs no network.

    ``INPUT.FORMAT``, ``PIXEL_MEAN`` and ``PIXEL_STD`` must be those of their training.

    Args:
        cfg: the config.
        start: the start weights, perhaps not fetched.
        findings: problems and warnings are added.
        eval_only: the run evaluates only.
        resume: the user asked to resume.
        overwrite: the user asked to replace an earlier run.
        config_file: the file that the config was read from.
    """
    folder = cfg.OUTPUT_DIR
    tag = os.path.join(folder, "last_checkpoint")
    if start.resumed:
        if start.error:
            reason = str(start.error).partition(" Fix: ")[0]
            findings.problems.append(f"{reason} Fix: {_another_checkpoint(folder, start.address)}")
        return
    moved_to = os.path.dirname(config_file) or "."
    if resume and _checkpoints(folder):
        findings.problems.append(
            f"--resume: file not found: '{tag}', which names the checkpoint to continue from. Fix: "
            f"{_another_checkpoint(folder)}"
        )
    elif resume and config_file and os.path.isfile(os.path.join(moved_to, "last_checkpoint")):
        findings.problems.append(
            f"--resume: no checkpoint in OUTPUT_DIR ('{folder}'), but in the folder of the config. Fix: add OUTPUT_DIR "
            f"{shlex.quote(moved_to)} to continue that run."
        )
    elif resume and not eval_only:
        findings.warnings.append(f"--resume: no checkpoint in '{folder}'. The run starts from its beginning.")
    elif os.path.isfile(tag) and not (eval_only or overwrite):
        findings.problems.append(
            f"OUTPUT_DIR ('{folder}'): contains checkpoints of an earlier run. Fix: continue it with --resume, keep "
            "both with another OUTPUT_DIR, or replace it with --overwrite."
        )
    if not start.address and eval_only:
        fix = "--resume for the last checkpoint of OUTPUT_DIR"
        if resume:
            fix = f"OUTPUT_DIR to the folder of a run; there is no checkpoint in '{folder}'"
        findings.problems.append(
            f"--eval-only: no weights to evaluate. Fix: set MODEL.WEIGHTS to a checkpoint, or {fix}."
        )
    if start.unfetched:
        for images in _expected_preprocessing(start.address):
            _check_preprocessing(cfg, images, findings)


def check_fetched(
    cfg: CfgNode, start: StartWeights, model: nn.Module | None, findings: Findings, *, allow_partial: bool
) -> None:
    """Check the content of the start weights.

    Args:
        cfg: the config.
        start: the opened weights, or the error of opening them.
        model: the detector of the config; only names are used. None skips the comparison with it.
        findings: problems and warnings are added.
        allow_partial: the user accepts weights that do not fit.
    """
    if start.opened:
        _check_recorded_config(cfg, start, start.opened, findings)
    if start.resumed:
        return
    if start.error:
        findings.problems.append(str(start.error))
    if start.opened:
        recorded = start.opened.preprocessing
        for images in [recorded] if recorded else _expected_preprocessing(start.address):
            _check_preprocessing(cfg, images, findings)
    if start.opened and model is not None:
        _check_norms(cfg, start.opened, model, findings, allow_partial)


def _check_recorded_config(cfg: CfgNode, start: StartWeights, checkpoint: Checkpoint, findings: Findings) -> None:
    """Compare the config with that of the run that wrote a checkpoint, which its tensors do not show."""
    differences = config_differences(checkpoint.metadata.get(RUN_RECORD), cfg.dump())
    if cfg.MODEL.RESNETS.DEPTH < 50:  # without 1x1 convolutions in its blocks
        differences.pop("MODEL.RESNETS.STRIDE_IN_1X1", None)
    what = f"{'--resume' if start.resumed else 'MODEL.WEIGHTS'} ('{start.address}')"
    if images := [differences.pop(key) for key in _PREPROCESSING_KEYS if key in differences]:
        findings.problems.append(
            f"{what}: trained on images of another format than this config gives: {', '.join(images)}. Fix: set these "
            "keys as in the checkpoint."
        )
    changed = [key for key in differences if key.startswith(("MODEL.", "config")) and key not in _HARMLESS_KEYS]
    if changed:
        findings.warnings.append(
            f"{what}: trained with other values of MODEL keys: "
            f"{summarize_names((differences[key] for key in changed), 20)}. Fix: set them as in the checkpoint, unless "
            "the change is intended."
        )


def _expected_preprocessing(address: str) -> list[Preprocessing]:
    return [images for pattern, images in _PREPROCESSING.items() if re.search(pattern, address)]


def _check_norms(cfg: CfgNode, weights: Checkpoint, model: nn.Module, findings: Findings, allow_partial: bool) -> None:
    """Refuse weights of other norms; with ``allow_partial``, only where they would never be trained."""
    differences = norm_differences(weights, model)
    if not allow_partial:
        if differences:
            findings.problems.append(str(norm_mismatch(weights.address, differences)))
        return
    differing = {text.partition(" ")[0] for text in differences}
    frozen = [name for name, tensor in model.named_parameters() if not tensor.requires_grad]
    if untrained := sorted({name.rpartition(".")[0] for name in frozen} & differing):
        findings.problems.append(_frozen_message(cfg, untrained, "were trained with another norm"))
    given = {_place(name) for name in weights.tensors} | {""}
    missing = [name for name in frozen if _place(name) not in given]
    if missing and len(given) > 1:
        findings.problems.append(_frozen_message(cfg, missing, "are not in the weights and keep random values"))


def _place(name: str) -> str:
    """Return the part of a name that all detectors with a ResNet share."""
    found = re.search(r"(?:^|\.)((?:stem\.conv1|res[2-5]\.\d+\.\w+)(?:\.norm)?)\.", name)
    return found[1] if found else ""


def _frozen_message(cfg: CfgNode, names: Sequence[str], why: str) -> str:
    return (
        f"MODEL.BACKBONE.FREEZE_AT ({cfg.MODEL.BACKBONE.FREEZE_AT}): {len(names)} frozen parts {why} "
        f"({summarize_names(names)}). Fix: set MODEL.BACKBONE.FREEZE_AT 0, or give weights that have them."
    )


def _another_checkpoint(folder: str, damaged: str = "") -> str:
    """Say how to continue without the last checkpoint or its name."""
    for path in _checkpoints(folder):
        try:
            if path != damaged and open_checkpoint(path):
                name = os.path.basename(path)
                return f"write {name}, the newest undamaged checkpoint, into {folder}/last_checkpoint."
        except (UserError, OSError):
            continue
    return "start anew with --overwrite instead of --resume; there is no undamaged checkpoint."


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
