"""Give the backbone of trained BN detectors GW at S1-B1, as start weights for part 2b of PLAN.md.

python -m experiments.bn_weights.convert_run DATA OUTPUT RUN ...

DATA is the folder of the photos that the detectors were trained on. Writes OUTPUT/bn_1.pth (BN) and OUTPUT/gw_1.pth
(GW, its scales divided as in convert.py) for the first run, bn_2.pth and gw_2.pth for the second, and so on.
"""

import itertools
import sys

import torch
from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.modeling import GeneralizedRCNN

from gw_detectron.weights import GWDetectionCheckpointer
from gw_detectron.weights.loading import load_model, open_detector

from .convert import convert_calibrated

#: that calibrate the scales
PHOTOS = 32


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
