"""Whether the weights a run starts from can be read, and are given the images they were trained on."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlparse

from detectron2.config import CfgNode
from detectron2.utils.file_io import PathManager

from ..checkpoint.provenance import TORCHVISION, Preprocessing, Provenance
from .findings import Findings
from .readable import notes_in, read_problem

# part of the address -> how Detectron2's model zoo, or this package, says the weights were trained
_IMAGES_OF_WEIGHTS = {
    r"^gw://": TORCHVISION,
    r"/ImageNetPretrained/torchvision/": TORCHVISION,
    r"/ImageNetPretrained/MSRA/": Preprocessing("BGR", (103.53, 116.28, 123.675), (1.0, 1.0, 1.0), True),
    r"/ImageNetPretrained/FAIR/R-": Preprocessing("BGR", (103.53, 116.28, 123.675), (1.0, 1.0, 1.0), False),
    # the copies under catalog:// were trained with a deviation of 1
    r"^detectron2://.*/FAIR/X-": Preprocessing("BGR", (103.53, 116.28, 123.675), (57.375, 57.12, 58.395), False),
}

# where the configs expect weights that users train themselves
_OWN_WEIGHTS = "weights/"


class Start(NamedTuple):
    """What a run starts from.

    Args:
        file: the file or address of the weights, or "" for random values.
        resumed: whether it is the last checkpoint of the same run.
    """

    file: str
    resumed: bool


def check_weights(cfg: CfgNode, findings: Findings, *, eval_only: bool, resume: bool) -> Start:
    """Adds what is wrong with the weights a run starts from.

    Args:
        cfg: the config.
        findings: where problems and warnings go.
        eval_only: nothing is going to be trained.
        resume: the run goes on from the last checkpoint of ``OUTPUT_DIR`` if there is one.
    """
    folder = cfg.OUTPUT_DIR
    tag = os.path.join(folder, "last_checkpoint")
    if resume and os.path.isfile(tag):
        return Start(_check_last_checkpoint(tag, findings), resumed=True)
    if resume and (checkpoints := _checkpoints(folder)):
        findings.problems.append(
            f"--resume finds no {tag}, which names the checkpoint to go on from, although there are checkpoints. "
            f"To go on from the newest, write {os.path.basename(checkpoints[0])} into that file; to start anew, "
            "leave out --resume."
        )
    elif resume and not eval_only:
        findings.warnings.append(f"--resume finds no checkpoint in {folder}: the run starts from its beginning.")
    elif os.path.isfile(tag) and not eval_only:
        findings.warnings.append(
            f"OUTPUT_DIR {folder} holds the checkpoints of an earlier run, and this one writes over them. "
            "--resume goes on from the last; another OUTPUT_DIR keeps both."
        )
    if cfg.MODEL.WEIGHTS:
        _check_weights_file(cfg, findings)
    elif eval_only:
        advice = "give --resume for the last one in OUTPUT_DIR"
        if resume:
            advice = f"OUTPUT_DIR to the folder of a run; --resume finds no checkpoint in {folder}"
        findings.problems.append(
            f"--eval-only has no weights to evaluate. Set MODEL.WEIGHTS to a checkpoint, or {advice}."
        )
    return Start(cfg.MODEL.WEIGHTS, resumed=False)


def _check_last_checkpoint(tag: str, findings: Findings) -> str:
    folder = os.path.dirname(tag)
    with open(tag, errors="replace") as file:
        name = file.read().strip()
    last = os.path.join(folder, name or "?")
    problem = read_problem(last) if name else "cannot be told, for that file is empty"
    if problem:
        whole = [path for path in _checkpoints(folder) if path != last and not read_problem(path)]
        advice = "There is no other whole checkpoint: delete that file to start anew."
        if whole:
            advice = f"To go on from the newest whole one, write {os.path.basename(whole[0])} into that file."
        findings.problems.append(f"The last checkpoint {last}, named in {tag}, {problem}. {advice}")
    return last


def _checkpoints(folder: str) -> list[str]:
    """The checkpoints of an output folder, newest first."""
    if not os.path.isdir(folder):
        return []
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".pth")]
    return sorted(paths, key=os.path.getmtime, reverse=True)


def _check_weights_file(cfg: CfgNode, findings: Findings) -> None:
    weights = cfg.MODEL.WEIGHTS
    expected = [images for pattern, images in _IMAGES_OF_WEIGHTS.items() if re.search(pattern, weights)]
    scheme = urlparse(weights).scheme if "://" in weights else ""
    try:
        # Detectron2 reads "...?matching_heuristics=True" as a file name and an option
        path = PathManager.get_local_path(weights.partition("?")[0])
    except (OSError, ValueError, KeyError) as error:
        findings.problems.append(
            f"MODEL.WEIGHTS {weights} cannot be fetched: {error}. The path of a file will do as well."
        )
        path = ""
    if path and os.path.isfile(path):
        problem = read_problem(path)
        if problem:
            findings.problems.append(f"MODEL.WEIGHTS {weights} {problem}. Get the file again.")
        else:
            expected = _noted_images(path) or expected
    elif path and scheme:
        findings.problems.append(
            f"MODEL.WEIGHTS {weights}: nothing here knows addresses that begin with {scheme}://. Set MODEL.WEIGHTS "
            'to the path of a file, or to "" to train from scratch with MODEL.BACKBONE.FREEZE_AT 0.'
        )
    elif path:
        advice = "Correct the path."
        if weights.startswith(_OWN_WEIGHTS):
            advice = (
                f"The configs name weights that nobody has published as {_OWN_WEIGHTS}...: put yours there, see "
                "MODEL_ZOO.md, or set MODEL.WEIGHTS to others."
            )
        findings.problems.append(f"MODEL.WEIGHTS {weights} is no file (looked from {os.getcwd()}). {advice}")
    for images in expected:
        _check_images(cfg, images, findings)


def _noted_images(path: str) -> list[Preprocessing]:
    notes = notes_in(path)
    if "provenance" in notes:  # of our conversion
        return [Provenance.from_dict(notes["provenance"]).preprocessing]
    return [TORCHVISION] if notes.get("__author__") == "torchvision" else []  # of Detectron2's conversion tool


def _check_images(cfg: CfgNode, images: Preprocessing, findings: Findings) -> None:
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
            f"MODEL.WEIGHTS {cfg.MODEL.WEIGHTS} were trained on other images than this config gives them. Set "
            f"{', '.join(wrong)}."
        )


def _close(values: Sequence[float], wanted: Sequence[float]) -> bool:
    return len(values) == len(wanted) and all(abs(a - b) < 0.05 for a, b in zip(values, wanted, strict=True))
