"""A trained detector and its test images, for experiments that feed images in another way than evaluation does."""

import argparse
import contextlib
import io
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from detectron2.data import DatasetCatalog, get_detection_dataset_dicts
from detectron2.structures import BoxMode, Instances
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError
from gw_detectron.weights import load_model
from gw_detectron.workbench.console import progress_bar
from gw_detectron.workbench.images import evaluation_input, read_image
from gw_detectron.workbench.run.run_datasets import use_recorded_datasets


class Example(NamedTuple):
    """An image as the detector gets it, and its objects.

    Args:
        image: (3, H, W).
        boxes: x1, y1, x2, y2 in its pixels, (n, 4).
        classes: (n,).
        crowds: whether each is a crowd region, (n,).
    """

    image: Tensor
    boxes: np.ndarray
    classes: np.ndarray
    crowds: np.ndarray


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
) -> tuple[nn.Module, list[Example]]:
    """Load a trained detector and images of the first dataset of ``DATASETS.TEST``.

    Args:
        config_file: of the detector.
        weights: its checkpoint.
        images: number of images; 0 means all.

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
    if dataset not in DatasetCatalog:
        raise ConfigError(
            f"DATASETS.TEST ('{dataset}'): not registered. Fix: register it in Python first."
        )
    model = load_model(cfg)
    records = get_detection_dataset_dicts(dataset, filter_empty=False)[: images or None]
    examples = []
    for record in progress_bar(records, desc="images", unit="image"):
        pixels = read_image(record["file_name"], cfg.INPUT.FORMAT)
        image = evaluation_input(pixels, cfg)
        scale = [image.shape[2] / pixels.shape[1], image.shape[1] / pixels.shape[0]] * 2
        objects = record["annotations"]
        boxes = [
            BoxMode.convert(each["bbox"], each["bbox_mode"], BoxMode.XYXY_ABS)
            for each in objects
        ]
        examples.append(
            Example(
                image,
                np.array(boxes, dtype=float).reshape(-1, 4) * scale,
                np.array([each["category_id"] for each in objects], dtype=int),
                np.array([each.get("iscrowd", 0) for each in objects], dtype=int),
            )
        )
    return model, examples


@torch.no_grad()
def detect(model: nn.Module, images: Sequence[Tensor]) -> list[Instances]:
    """Detect the objects of one batch of images, in their pixels."""
    return [
        output["instances"] for output in model([{"image": image} for image in images])
    ]


def box_ap(examples: Sequence[Example], detections: Sequence[Instances]) -> float:
    """Compute COCO's box AP (0.50 to 0.95), in percent."""
    classes = sorted({int(each) for example in examples for each in example.classes})
    truth: list[dict[str, object]] = []
    found: list[dict[str, object]] = []
    for index, (example, instances) in enumerate(
        zip(examples, detections, strict=True), start=1
    ):
        for box, category, crowd in zip(
            example.boxes, example.classes, example.crowds, strict=True
        ):
            truth.append(
                {
                    "id": len(truth) + 1,
                    "iscrowd": int(crowd),
                    **_annotation(index, box, category),
                }
            )
        columns = instances.pred_boxes.tensor, instances.scores, instances.pred_classes
        for box, score, category in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            found.append({"score": score, **_annotation(index, box, category)})
    if not found:
        return 0.0
    coco = COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": index} for index in range(1, len(examples) + 1)],
        "categories": [{"id": each} for each in classes],
        "annotations": truth,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return 100 * float(evaluation.stats[0])


def _annotation(image: int, box: Sequence[float], category: int) -> dict[str, object]:
    x, y, right, bottom = map(float, box)
    return {
        "image_id": image,
        "category_id": int(category),
        "bbox": [x, y, right - x, bottom - y],
        "area": (right - x) * (bottom - y),
    }
