"""Train MONAI's UNet on nuclei with a norm; see PLAN.md. Needs ``pip install monai``.

python -m experiments.hosts.unet NUCLEI RESULTS.csv [NORM ...]

NUCLEI is the folder of prepare.py. Rows that the file has already are not trained again.
"""

import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data.detection_utils import read_image
from monai.data import DataLoader, Dataset
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.layers import Norm
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    RandFlipd,
    RandRotate90d,
    RandSpatialCropd,
    ScaleIntensityd,
    SpatialPadd,
)
from monai.utils import set_determinism
from pycocotools.coco import COCO
from torch import nn

from gw_detectron import GroupWhitening2d
from gw_detectron.workbench.compare.plan import SEARCH_SEED

from ..study import ResultsFile, score_arms

Norm.add_factory_callable("GW", lambda dimensions: GroupWhitening2d)
NORMS = {
    "INSTANCE": "INSTANCE",
    "BATCH": "BATCH",
    "GROUP": ("GROUP", {"num_groups": 8}),
    "GW": ("GW", {"num_groups": 16}),
}
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
SEEDS = (1, 2, 3, 4)
ITERATIONS = 800
BATCH = 2
SIDE = 192
_KEYS = ("image", "mask")


@functools.cache
def items(data: Path, file: str) -> list[dict[str, np.ndarray]]:
    """Return the images of a COCO file and the masks of all objects, with channels first."""
    coco = COCO(data / file)
    read = []
    for number, image in coco.imgs.items():
        masks = [coco.annToMask(a) for a in coco.imgToAnns[number]]
        mask = np.maximum.reduce(masks).astype(np.float32)
        pixels = read_image(data / "images" / image["file_name"], "RGB")
        read.append({"image": pixels.transpose(2, 0, 1), "mask": mask[None]})
    return read


def batches(data: Path, file: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random crops without end."""
    augment = Compose(
        [
            ScaleIntensityd("image"),
            SpatialPadd(_KEYS, (SIDE, SIDE)),
            RandSpatialCropd(_KEYS, (SIDE, SIDE), random_size=False),
            RandFlipd(_KEYS, prob=0.5, spatial_axis=0),
            RandRotate90d(_KEYS, prob=0.75, max_k=3),
        ]
    )
    dataset = Dataset(items(data, file), augment)
    loader = DataLoader(dataset, BATCH, shuffle=True, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def train(
    data: Path, file: str, norm: str, rate: float, seed: int, iterations: int
) -> nn.Module:
    """Return a trained network."""
    set_determinism(seed)
    network = UNet(
        spatial_dims=2,
        in_channels=3,
        out_channels=1,
        channels=(16, 32, 64, 128, 256),
        strides=(2, 2, 2, 2),
        norm=NORMS[norm],
    )
    optimizer = torch.optim.Adam(network.parameters(), rate)
    criterion = DiceCELoss(sigmoid=True)
    for batch in itertools.islice(batches(data, file), iterations):
        optimizer.zero_grad()
        loss = criterion(network(batch["image"]), batch["mask"])
        loss.backward()
        optimizer.step()
    return network


@torch.no_grad()
def dice(network: nn.Module, data: Path, file: str) -> float:
    """Return the mean Dice of the images of a file, in percent."""
    network.eval()
    metric = DiceMetric()
    for item in map(ScaleIntensityd("image"), items(data, file)):
        image = torch.as_tensor(item["image"])[None]
        logits: Any = sliding_window_inference(image, (SIDE, SIDE), 4, network, 0.25)
        metric(logits > 0, torch.as_tensor(item["mask"])[None])
    return 100 * float(metric.aggregate())


def main(folder: str, results: str, *norms: str) -> None:
    data = Path(folder)
    file = ResultsFile(results, ("norm", "rate", "seed"), ("dice", "seconds"))

    def run(norm: str, rate: float, seed: int) -> float:
        if seed == SEARCH_SEED:
            network = train(data, "fit.json", norm, rate, seed, ITERATIONS // 2)
            return dice(network, data, "tune.json")
        network = train(data, "train.json", norm, rate, seed, ITERATIONS)
        return dice(network, data, "val.json")

    arms = [(norm,) for norm in norms or NORMS]
    score_arms(file, arms, run, RATES, SEEDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
