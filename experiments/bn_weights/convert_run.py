"""Give the backbone of trained BN detectors GW at S1-B1, as start weights for part 2b of PLAN.md.

python -m experiments.bn_weights.convert_run DATA OUTPUT RUN ...

DATA is the folder of the photos that the detectors were trained on. Writes OUTPUT/bn_1.pth (BN) and OUTPUT/gw_1.pth
(GW, its scales divided by the standard deviation of its output, which is 1 after BN) for the first run, bn_2.pth and
gw_2.pth for the second, and so on.
"""

import itertools
import sys
import warnings

import torch
from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from gw_detectron import convert_norms
from gw_detectron.layers import match_scales
from gw_detectron.norms.conversion import Plan
from gw_detectron.weights import GWDetectionCheckpointer
from gw_detectron.weights.loading import load_model, open_detector

#: that calibrate the scales
PHOTOS = 32


@torch.no_grad()
def convert_calibrated(model: nn.Module, plan: Plan, images: Tensor) -> None:
    """Give a network in evaluation mode other norms, and divide scales of GW for these images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the statistics that GW and GN lose
        convert_norms(model, plan)

    with match_scales(model):
        model(images)


@torch.no_grad()
def write_starts(data: str, output: str, run: str, number: int) -> None:
    """Write the start weights of a run."""
    cfg = open_detector(run).cfg
    model = load_model(cfg)
    assert isinstance(model, GeneralizedRCNN)
    checkpointer = GWDetectionCheckpointer(model, output)
    checkpointer.save(f"bn_{number}")

    loader = build_detection_test_loader(cfg, data, num_workers=0)
    photos = [photo for batch in itertools.islice(loader, PHOTOS) for photo in batch]
    images = model.preprocess_image(photos).tensor
    backbone = model.get_submodule("backbone.bottom_up")
    convert_calibrated(backbone, {"S1-B1": "GW"}, images)
    checkpointer.save(f"gw_{number}")


def main(folder: str, output: str, *runs: str) -> None:
    data = "photos_of_the_start"
    register_coco_instances(data, {}, f"{folder}/train.json", f"{folder}/images")
    for number, run in enumerate(runs, start=1):
        write_starts(data, output, run, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
