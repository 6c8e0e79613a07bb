"""Give the ResNet-18 of pretrain.py other norms, as start weights for part 2 of PLAN.md.

python -m experiments.bn_weights.convert output/r18_bn.pth CIFAR/test output/r18

Writes output/r18_bn.pkl (BN), output/r18_gw.pkl (GW at S1-B1) and output/r18_gn.pkl (GN). Scales of GW are divided by
the standard deviation of its output, which is 1 after BN.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from gw_detectron import convert_norms
from gw_detectron.layers import match_scales
from gw_detectron.norms.conversion import Plan
from gw_detectron.weights.converting import convert_file

from .pretrain import images_of

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


def main(source: str, test_folder: str, target: str) -> None:
    torch.manual_seed(0)
    batches = DataLoader(images_of(test_folder, train=False), 64, shuffle=True)
    images, _ = next(iter(batches))
    for name, (plan, norm) in TARGETS.items():
        model = resnet18(num_classes=10)
        model.load_state_dict(torch.load(source))
        convert_calibrated(model.eval(), plan, images)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"{name}.pth")
            torch.save(model.state_dict(), file)
            convert_file(file, f"{target}_{name}.pkl", norm=norm, overwrite=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
