"""Predictors: from an image to the objects in it, whatever kind of file holds the detector."""

from typing import Protocol

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import Metadata
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.structures import Instances
from PIL import Image
from torch import nn

from ..data.images import channels_first, evaluation_input, resize_shortest_edge
from ..errors import ConfigError, DataError
from ..export.run_exported import ExportedFile, detect, postprocess


class Predictor(Protocol):
    """Detect objects in an image, (H, W, 3) RGB uint8.

    The result has the objects above a score, in pixels of this image, on the CPU: ``pred_boxes``, ``scores``,
    ``pred_classes``, and ``pred_masks``, (N, H, W) bool, or ``pred_keypoints`` of a model that has them.
    """

    metadata: Metadata

    def __call__(self, image: np.ndarray) -> Instances: ...


class TrainedPredictor:
    """Predict with a detector of Detectron2, as its ``DefaultPredictor`` does.

    Args:
        model: the detector, in evaluation mode.
        cfg: its config, for channel order and size of the input.
        metadata: of its classes.
        score_threshold: scores above it are kept.
    """

    def __init__(self, model: nn.Module, cfg: CfgNode, metadata: Metadata, score_threshold: float) -> None:
        self.model = model
        self.cfg = cfg
        self.metadata = metadata
        self.score_threshold = score_threshold

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
        return _above(self.score_threshold, output["instances"].to("cpu"))


class ExportedPredictor:
    """Predict with an exported detector, of one image or of batches.

    Args:
        file: the detector.
        metadata: of its classes.
        score_threshold: scores above it are kept.
        sides: shorter and longest side for a file that does not resize.
    """

    def __init__(
        self, file: ExportedFile, metadata: Metadata, score_threshold: float, sides: tuple[int, int] | None = None
    ) -> None:
        self.file = file
        self.metadata = metadata
        self.score_threshold = score_threshold
        self.sides = sides

    def __call__(self, image: np.ndarray) -> Instances:
        expected = self.file.description["input"]
        pixels = convert_PIL_to_numpy(Image.fromarray(image), expected["channels"])
        tensor = resize_shortest_edge(pixels, *self.sides) if self.sides else channels_first(pixels)
        size, smallest = tensor.shape[1:], expected["smallest_side"]
        if not self.sides and min(size) < smallest:
            raise DataError(
                f"image ({size[1]} x {size[0]} pixels): the file needs sides of {smallest}. Fix: give a larger image."
            )
        (found,) = detect(self.file, [tensor])
        return postprocess(_above(self.score_threshold, found), *image.shape[:2])


def _above(score_threshold: float, found: Instances) -> Instances:
    return found[found.scores > score_threshold]
