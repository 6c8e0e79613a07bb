"""Open the predictor of a run folder, a checkpoint or an exported file."""

import json
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import Metadata
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.structures import Instances
from PIL import Image
from torch import nn

from ..checkpoint import last_checkpoint, load_model
from ..config import find_config_file, get_value, read_config
from ..data import class_metadata
from ..data.images import channels_first, evaluation_input, resize_shortest_edge
from ..errors import ConfigError, DataError, MissingFileError
from ..export.run_exported import OPENERS, ExportedFile, detect, open_exported, postprocess
from ..modeling.config_keys import object_count_keys

log = logging.getLogger(__name__)

_REPORT = "parity.json"  # in the folder of an export
_OWN_ARGUMENTS = {
    "MODEL.WEIGHTS": "name the weights as MODEL",
    "MODEL.DEVICE": "give --device",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": "give --score-threshold",
    "MODEL.RETINANET.SCORE_THRESH_TEST": "give --score-threshold",
}


class Predictor(Protocol):
    """Detect objects in an image, (H, W, 3) RGB uint8.

    The result has the objects above a score, in pixels of this image, on the CPU: ``pred_boxes``, ``scores``,
    ``pred_classes``, and ``pred_masks``, (N, H, W) bool, or ``pred_keypoints`` of a model that has them.
    """

    metadata: Metadata

    def __call__(self, image: np.ndarray) -> Instances: ...


class TrainedPredictor:
    """Predict with a detector of Detectron2, as its ``DefaultPredictor`` does, from RGB pixels."""

    def __init__(self, model: nn.Module, cfg: CfgNode, metadata: Metadata, score_threshold: float) -> None:
        self.model, self.cfg, self.metadata, self.score_threshold = model, cfg, metadata, score_threshold

    def __call__(self, image: np.ndarray) -> Instances:
        height, width = image.shape[:2]
        pixels = convert_PIL_to_numpy(Image.fromarray(image), self.cfg.INPUT.FORMAT)
        with torch.no_grad():
            (output,) = self.model([{"image": evaluation_input(pixels, self.cfg), "height": height, "width": width}])
        if "instances" not in output:
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE ('{self.cfg.MODEL.META_ARCHITECTURE}'): predicts no boxes but "
                f"{', '.join(output)}. Fix: give a detector."
            )
        found = output["instances"].to("cpu")
        return found[found.scores > self.score_threshold]


class ExportedPredictor:
    """Predict with an exported detector; ``sides``, shorter and longest, are for a file that does not resize."""

    def __init__(
        self, file: ExportedFile, metadata: Metadata, score_threshold: float, sides: tuple[int, int] | None = None
    ) -> None:
        self.file, self.metadata, self.score_threshold, self.sides = file, metadata, score_threshold, sides

    def __call__(self, image: np.ndarray) -> Instances:
        expected = self.file.description["input"]
        pixels = convert_PIL_to_numpy(Image.fromarray(image), expected["channels"])
        tensor = resize_shortest_edge(pixels, *self.sides) if self.sides else channels_first(pixels)
        smallest = expected["smallest_side"]
        if not self.sides and min(image.shape[:2]) < smallest:
            raise DataError(f"image {image.shape}: the file needs sides of {smallest}. Fix: give a larger image.")
        (found,) = detect(self.file, [tensor])
        return postprocess(found[found.scores > self.score_threshold], *image.shape[:2])


def open_predictor(
    model: str | os.PathLike[str],
    *,
    config_file: str | os.PathLike[str] | None = None,
    opts: Sequence[Any] = (),
    score_threshold: float = 0.5,
    device: str | None = None,
    class_names: Sequence[str] | None = None,
) -> Predictor:
    """Open the predictor of a run folder, a checkpoint or an exported file.

    Args:
        model: an ``OUTPUT_DIR``, whose last checkpoint is loaded; a checkpoint; or an exported detector or its folder.
        config_file: config of a checkpoint; default: the ``config.yaml`` beside it.
        opts: config keys to change, as key, value, ...
        score_threshold: scores above it are predicted.
        device: ``cpu`` or ``cuda``; default: a GPU, if there is one. Exported files run on the CPU.
        class_names: default: those of the datasets in the config. An exported file has its own.

    Raises:
        ConfigError: an argument or a config key cannot be used.
        MissingFileError: the model or its config does not exist.
        UserError: the weights or the exported file cannot be used.
    """
    if not 0 <= score_threshold <= 1:
        raise ConfigError(f"score_threshold ({score_threshold:g}): not between 0 and 1. Fix: give e.g. 0.5.")
    model = detector_file(model)
    if Path(model).suffix not in OPENERS:
        return _open_trained(model, config_file, opts, score_threshold, _device(device), class_names)
    if config_file is not None or opts or class_names or device not in (None, "cpu"):
        reason = "an exported file has its own classes, no config, and runs on the CPU"
        raise ConfigError(f"MODEL ('{model}'): {reason}. Fix: leave out config, keys, device and class names.")
    return _open_exported(Path(model), score_threshold)


def detector_file(model: str | os.PathLike[str]) -> str:
    """Return the file of a detector: the last checkpoint of a run folder, or the exported file of an export.

    Raises:
        MissingFileError: the model does not exist.
        UserError: the folder does not tell its file.
    """
    model = os.fspath(model)
    if "://" in model:
        return model
    if not os.path.exists(model):
        raise MissingFileError(f"MODEL ('{model}'): not found (cwd: {os.getcwd()}). Fix: give an existing path.")
    if not os.path.isdir(model):
        return model
    exported = _export_report(Path(model)).get("file")
    return os.path.join(model, exported) if exported else last_checkpoint(model)


def _open_exported(path: Path, score_threshold: float) -> Predictor:
    file = open_exported(path)
    about = file.description
    if "detections" not in about:
        raise ConfigError(f"MODEL ('{path}'): not a detector. Fix: give a file of gw-detectron export.")
    if score_threshold < about["score_threshold"]:
        raise ConfigError(
            f"score_threshold ({score_threshold:g}): the file drops scores up to {about['score_threshold']:g}. Fix: "
            "give at least this, or export with a lower SCORE_THRESH_TEST of MODEL.ROI_HEADS or MODEL.RETINANET."
        )
    sides = None
    if about["input"]["name"] == "images":
        resized = _export_report(path.parent).get("resized_in_evaluation")
        if resized is None:
            raise ConfigError(
                f"MODEL ('{path}'): the file does not resize, and no {_REPORT} beside it tells the size. Fix: export "
                "with --one-image."
            )
        sides = (resized["shorter"], resized["longer_at_most"])
    metadata = Metadata()
    if names := about["class_names"]:
        metadata.thing_classes = names
    if ids := about.get("category_ids"):
        metadata.thing_dataset_id_to_contiguous_id = {number: index for index, number in enumerate(ids)}
    return ExportedPredictor(file, metadata, score_threshold, sides)


def _export_report(folder: Path) -> dict[str, Any]:
    """Read the report in the folder of an export; {} without one."""
    path = folder / _REPORT
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"'{path}': damaged: {error}. Fix: export the model again.") from error


def _open_trained(
    model: str,
    config_file: str | os.PathLike[str] | None,
    opts: Sequence[Any],
    score_threshold: float,
    device: str,
    class_names: Sequence[str] | None,
) -> Predictor:
    for key, instead in _OWN_ARGUMENTS.items():
        if key in opts:
            raise ConfigError(f"{key}: not a key for prediction, which has an argument for it. Fix: {instead}.")
    config_file = find_config_file(config_file or os.path.join(os.path.dirname(model), "config.yaml"))
    if not os.path.isfile(config_file):
        raise MissingFileError(
            f"MODEL ('{model}'): its config is not found: '{config_file}'. Fix: give --config-file, or a run folder; "
            f"`gw-detectron weights describe --config {shlex.quote(model)}` prints the config that it was trained with."
        )
    cfg = read_config(config_file, opts)
    cfg.MODEL.WEIGHTS = model
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = cfg.MODEL.RETINANET.SCORE_THRESH_TEST = score_threshold
    metadata = _metadata(cfg, config_file, class_names)
    return TrainedPredictor(load_model(cfg, device=device), cfg, metadata, score_threshold)


def _metadata(cfg: CfgNode, config_file: str, class_names: Sequence[str] | None) -> Metadata:
    metadata = Metadata(thing_classes=list(class_names)) if class_names else class_metadata(cfg, config_file)
    names = metadata.get("thing_classes", None)
    if names is None:
        log.warning("class names: unknown, as the dataset of the config is. Fix: give --class-names.")
        return metadata
    for key in object_count_keys(cfg):
        if get_value(cfg, key) != len(names):
            raise ConfigError(
                f"class names ({len(names)}): {key} is {get_value(cfg, key)}. Fix: give one name each by --class-names."
            )
    return metadata


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        raise ConfigError(f"device ('{name}'): unknown or not in this machine. Fix: give cpu or cuda.") from error
    return name
