"""Give trained BN detectors the statistics of other photos, as a control of part 2b of PLAN.md.

python -m experiments.bn_weights.adapt_run TRAIN.json IMAGES OUTPUT RUN ...

Writes OUTPUT/adapted_1.pth for the first run, and so on. Scales and shifts stay, so the outputs change.
Source: Li et al., Revisiting Batch Normalization for Practical Domain Adaptation (arXiv 1603.04779).
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.modeling import GeneralizedRCNN
from torch import nn

from gw_detectron.layers import adapt_statistics
from gw_detectron.weights import GWDetectionCheckpointer
from gw_detectron.weights.loading import load_model, open_detector

BATCHES = 8
BATCH = 8


def adapt_to(model: nn.Module, photos: Sequence[dict[str, Any]]) -> None:
    """Give the BN layers of a backbone the average statistics of batches of photos."""
    assert isinstance(model, GeneralizedRCNN)
    with torch.no_grad(), adapt_statistics(model.backbone):
        for first in range(0, len(photos), BATCH):
            images = model.preprocess_image(photos[first : first + BATCH])
            model.backbone(images.tensor)


def adapt(data: str, output: str, run: str, number: int) -> None:
    """Write the detector of a run whose BN layers have the statistics of some photos."""
    cfg = open_detector(run).cfg
    model = load_model(cfg)
    loader = build_detection_test_loader(cfg, data, num_workers=0)
    photos = [photo for batch in loader for photo in batch]
    random.Random(0).shuffle(photos)
    adapt_to(model, photos[: BATCHES * BATCH])
    GWDetectionCheckpointer(model, output).save(f"adapted_{number}")


def main(train_json: str, images: str, output: str, *runs: str) -> None:
    data = "photos_to_adapt_to"
    register_coco_instances(data, {}, train_json, images)
    for number, run in enumerate(runs, start=1):
        adapt(data, output, run, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
