"""The predictor of a run folder or a checkpoint."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import Metadata
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.structures import Instances
from PIL import Image
from torch import nn

from ...config import get_value
from ...errors import ConfigError
from ...modeling.build import object_count_keys
from ...weights import load_model, open_detector, trained_classes, trained_scale
from ..dataset.metadata import class_metadata
from ..images import evaluation_input
from ..run.bn_statistics import change_statistics
from ..run.checks import device_problem

log = logging.getLogger(__name__)

_OWN_ARGUMENTS = (
    "MODEL.WEIGHTS",
    "MODEL.DEVICE",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST",
    "MODEL.RETINANET.SCORE_THRESH_TEST",
    "TEST.AUG.ENABLED",
)


class Predictor:
    """Detect objects in an image, (H, W, 3) RGB uint8, as Detectron2's ``DefaultPredictor``.

    That one takes BGR. The result has the objects above a score, in pixels of this image, on the
    CPU: ``pred_boxes``, ``scores``, ``pred_classes``, and ``pred_masks``, (N, H, W) bool, or
    ``pred_keypoints`` of a model that has them.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: CfgNode,
        metadata: Metadata,
        score_threshold: float,
        image_scale: float = 0.0,
    ) -> None:
        self.model = model
        self.cfg = cfg
        self.metadata = metadata
        self.score_threshold = score_threshold
        #: median factor by which training resized images, 0 if unknown
        self.image_scale = image_scale
        #: whether the last image has as many objects as the model gives
        self.is_full = False

    def __call__(self, image: np.ndarray) -> Instances:
        with torch.no_grad():
            (output,) = self.model([self.input(image)])
        if "instances" not in output:
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE ('{self.cfg.MODEL.META_ARCHITECTURE}'): predicts no "
                f"boxes but {', '.join(output)}. Fix: give a detector."
            )

        instances = output["instances"].to("cpu")
        instances = instances[instances.scores > self.score_threshold]
        limit = self.cfg.TEST.DETECTIONS_PER_IMAGE
        self.is_full = 0 <= limit <= len(instances)  # -1: none
        return instances

    def input(self, image: np.ndarray, scale: float | None = None) -> dict[str, Any]:
        """Return an image as an input of the model, resized as the config says or by a factor."""
        pixels = convert_PIL_to_numpy(Image.fromarray(image), self.cfg.INPUT.FORMAT)
        return {
            "image": evaluation_input(pixels, self.cfg, scale),
            "height": image.shape[0],
            "width": image.shape[1],
        }


def open_predictor(
    model: str | os.PathLike[str],
    *,
    config_file: str | os.PathLike[str] | None = None,
    opts: Sequence[Any] = (),
    score_threshold: float = 0.5,
    device: str | None = None,
    class_names: Sequence[str] | None = None,
    mix: str = "",
    adapt: str = "",
) -> Predictor:
    """Open the predictor of a run folder or a checkpoint.

    Args:
        model: an ``OUTPUT_DIR``, whose best or last checkpoint is loaded, or a checkpoint.
        config_file: config of a checkpoint; default: the ``config.yaml`` beside it.
        opts: config keys to change, as key, value, ...
        score_threshold: scores above it are predicted.
        device: ``cpu`` or ``cuda``; default: a GPU, if there is one.
        class_names: default: the checkpoint's record, else the datasets in the config.
        mix: image statistics in the BN layers of the backbone, see
            :func:`gw_detectron.norms.mix_statistics`; "" for none.
        adapt: a folder of photos whose statistics these layers get, see
            :func:`gw_detectron.layers.adapt_statistics`; "" for none.
    """
    if not 0 <= score_threshold <= 1:
        raise ConfigError(
            f"score_threshold ({score_threshold:g}): not between 0 and 1. Fix: give e.g. 0.5."
        )
    for key in opts:
        if key in _OWN_ARGUMENTS:
            raise ConfigError(
                f"{key}: not a key for prediction. Fix: give MODEL, --device or --score-threshold; "
                "test-time augmentation is of gw-detectron eval only."
            )

    cfg, _, checkpoint = open_detector(model, config_file or "", opts)
    if cfg.TEST.AUG.ENABLED:
        log.warning(
            "TEST.AUG.ENABLED (True): prediction has no test-time augmentation."
        )
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = score_threshold
    cfg.MODEL.RETINANET.SCORE_THRESH_TEST = score_threshold

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    reason = device_problem(device)
    if reason:
        raise ConfigError(
            f"--device ('{device}'): torch cannot use it: {reason}. Fix: give cpu, or leave it out."
        )
    detector = load_model(cfg, checkpoint=checkpoint, device=device)
    if mix or adapt:
        weights = cfg.MODEL.WEIGHTS
        change_statistics(detector, cfg, mix=mix, adapt=adapt, weights=weights)
    metadata = _metadata(cfg, trained_classes(checkpoint), class_names)
    return Predictor(
        detector, cfg, metadata, score_threshold, trained_scale(checkpoint)
    )


def _metadata(
    cfg: CfgNode, trained: Mapping[int, str], class_names: Sequence[str] | None
) -> Metadata:
    """Return names and category ids of the classes, if they are known."""
    metadata = class_metadata(cfg, trained)
    names = metadata.get("thing_classes", None)
    if class_names:
        known = metadata.as_dict() if names and len(names) == len(class_names) else {}
        metadata = Metadata(**{**known, "thing_classes": list(class_names)})
        names = class_names

    if names is None:
        log.warning(
            "class names: not in the checkpoint or the config's datasets. Fix: give --class-names."
        )
        return metadata

    for key in object_count_keys(cfg):
        count = get_value(cfg, key)
        if count != len(names):
            raise ConfigError(
                f"class names ({len(names)}): {key} is {count}. Fix: give one name each by "
                "--class-names."
            )
    return metadata
