"""A trained detector and its test images, for experiments that feed images in another way than evaluation does."""

import argparse
import contextlib
import io
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.data import MetadataCatalog, get_detection_dataset_dicts
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Instances
from torch import nn

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError
from gw_detectron.weights import load_model
from gw_detectron.workbench.console import progress_bar
from gw_detectron.workbench.images import evaluation_input, read_image
from gw_detectron.workbench.run.run_datasets import use_recorded_datasets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`load_detector`."""
    parser.add_argument(
        "--config-file",
        required=True,
        metavar="FILE",
        help="config of the trained detector",
    )
    parser.add_argument(
        "--weights", required=True, metavar="FILE", help="its checkpoint"
    )
    parser.add_argument(
        "--images", type=int, default=0, help="images of the first test dataset; 0: all"
    )


def load_detector(
    config_file: str, weights: str, images: int = 0
) -> tuple[nn.Module, list[dict[str, Any]], COCOEvaluator]:
    """Load a trained detector and images of the first dataset of ``DATASETS.TEST``.

    Args:
        config_file: of the detector.
        weights: its checkpoint.
        images: number of images; 0 means all.

    Returns:
        The detector, its inputs (records with an ``image``), and the evaluator of its boxes.

    Raises:
        ConfigError: the number of images is negative, or there is no test dataset.
        Other errors: see :func:`gw_detectron.weights.load_model`.
    """
    cfg = read_config(config_file, ["MODEL.WEIGHTS", weights, "MODEL.DEVICE", "cpu"])
    if images < 0:
        raise ConfigError(
            f"images ({images}): negative. Fix: give 1 or more, or 0 for all."
        )
    if not cfg.DATASETS.TEST:
        raise ConfigError(
            "DATASETS.TEST (()): names no dataset. Fix: name one in the config."
        )
    dataset = cfg.DATASETS.TEST[0]
    use_recorded_datasets(cfg, config_file, os.path.dirname(config_file))
    if "json_file" not in MetadataCatalog.get(dataset).as_dict():
        raise ConfigError(
            f"DATASETS.TEST ('{dataset}'): not registered, or without a COCO json. Fix: give the "
            "config.yaml of a run on a COCO json."
        )
    model = load_model(cfg)
    records = get_detection_dataset_dicts(dataset, filter_empty=False)[: images or None]
    inputs = []
    for record in progress_bar(records, desc="images", unit="image"):
        pixels = read_image(record["file_name"], cfg.INPUT.FORMAT)
        inputs.append({**record, "image": evaluation_input(pixels, cfg)})
    evaluator = COCOEvaluator(dataset, ("bbox",), False, use_fast_impl=False)
    return model, inputs, evaluator


@torch.no_grad()
def detect(model: nn.Module, inputs: Sequence[dict[str, Any]]) -> list[Instances]:
    """Detect the objects of one batch, in pixels of the photos."""
    return [output["instances"] for output in model(inputs)]


def box_ap(
    evaluator: COCOEvaluator,
    inputs: Sequence[dict[str, Any]],
    detections: Sequence[Instances],
) -> float:
    """Compute COCO's box AP (0.50 to 0.95) of some images, in percent."""
    outputs = [{"instances": instances} for instances in detections]
    evaluator.reset()
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator.process(inputs, outputs)
        results = evaluator.evaluate([each["image_id"] for each in inputs])
    ap = results["bbox"]["AP"]
    return ap if math.isfinite(ap) else 0.0  # without any detection
