"""Give the ResNet-18 of pretrain.py other norms or statistics, as start weights for parts 2 and 2d of PLAN.md.

python -m experiments.bn_weights.convert output/r18_bn.pth CIFAR/test TRAIN.json IMAGES output/r18

Writes output/r18_bn.pkl (BN), output/r18_gw.pkl (GW at S1-B1), output/r18_gn.pkl (GN), and output/r18_adapted.pkl (BN
with the statistics of 64 of the images). Scales of GW are divided by the standard deviation of its output, which is 1
after BN.
"""

import json
import random
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_image
from torchvision.models import resnet18
from torchvision.transforms import v2

from gw_detectron import convert_norms
from gw_detectron.layers import adapt_statistics, match_scales
from gw_detectron.norms.conversion import Plan
from gw_detectron.weights.converting import convert_file

from .adapt_run import BATCH, BATCHES
from .pretrain import images_of, normalize

#: side of the images whose statistics BN takes, as that of nuclei in the trainings
SIDE = 256

#: name of the file -> plan of the conversion, and the norm that the file needs stated
TARGETS: dict[str, tuple[Plan, str | None]] = {
    "bn": ({}, None),
    "gw": ({"S1-B1": "GW"}, "GW"),
    "gn": ({"*": "GN"}, "GN"),
}


@torch.no_grad()
def convert_calibrated(model: nn.Module, plan: Plan, images: Tensor) -> None:
    """Give a network in evaluation mode other norms, and divide scales of GW for these images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the statistics that GW and GN lose
        if plan:
            convert_norms(model, plan)

    with match_scales(model):
        model(images)


def read_images(annotations: str, folder: str) -> Tensor:
    """Read images of a COCO file, drawn at random, as a batch of squares."""
    names = [
        image["file_name"]
        for image in json.loads(Path(annotations).read_text())["images"]
    ]
    random.Random(0).shuffle(names)
    steps = v2.Compose([v2.Resize((SIDE, SIDE)), *normalize()])
    return torch.stack(
        [
            steps(decode_image(str(Path(folder, name)), ImageReadMode.RGB))
            for name in names[: BATCHES * BATCH]
        ]
    )


def write(model: nn.Module, file: str, norm: str | None = None) -> None:
    """Write a network of torchvision with Detectron2's names."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "model.pth")
        torch.save(model.state_dict(), source)
        convert_file(source, file, norm=norm, overwrite=True)


def main(
    source: str, test_folder: str, annotations: str, folder: str, target: str
) -> None:
    def read_model() -> nn.Module:
        model = resnet18(num_classes=10)
        model.load_state_dict(torch.load(source))
        return model.eval()

    torch.manual_seed(0)
    batches = DataLoader(images_of(test_folder, train=False), 64, shuffle=True)
    images, _ = next(iter(batches))
    for name, (plan, norm) in TARGETS.items():
        model = read_model()
        convert_calibrated(model, plan, images)
        write(model, f"{target}_{name}.pkl", norm)

    model = read_model()
    with torch.no_grad(), adapt_statistics(model):
        for batch in read_images(annotations, folder).split(BATCH):
            model(batch)
    write(model, f"{target}_adapted.pkl")


if __name__ == "__main__":
    main(*sys.argv[1:])
