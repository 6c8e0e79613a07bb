"""Train detectors whose norms have a given scale; see PLAN.md.

python -m experiments.scale.train CONFIG.yaml TRAIN.json TEST.json IMAGES RESULTS.csv OUTPUT SEEDS ARM ...

Rows that the file has already are not trained again.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gw_detectron import GroupWhitening2d
from gw_detectron.norms import norm_spec
from gw_detectron.ops.group_whitening.op import whiten
from gw_detectron.workbench.run import Trainer

from ..study import ResultsFile, train

KEYS = ("data", "arm", "seed")
VALUES = ("AP", "seconds")
SMALL = 0.21
#: iterations and learning rate by the name of the config
SCHEDULES = {
    "bccd": (400, 0.04),
    "nuclei": (400, 0.04),
    "faster_rcnn_R_18_FPN_small_batch": (2000, 0.01),
}


@dataclass(frozen=True)
class Arm:
    """A norm of the backbone, its scale, and the learning rate of its shifts."""

    norm: str
    conv: str = ""
    scale: float = 1.0
    unit_variance: bool = False
    shift_rate: float = 1.0


ARMS = {
    "GN": Arm("GN"),
    "GN k=0.21": Arm("GN", scale=SMALL),
    "BN": Arm("BN"),
    "BN k=0.21": Arm("BN", scale=SMALL),
    "GN+WS": Arm("GN", "WS"),
    "GN+WS k=0.21": Arm("GN", "WS", scale=SMALL),
    "GW2": Arm("GW:iters=2"),
    "GW2 variance 1": Arm("GW:iters=2", unit_variance=True),
    "GW": Arm("GW"),
    "GW x0.39": Arm("GW", scale=0.39),
    "GW variance 1": Arm("GW", unit_variance=True),
    "GN fast shifts": Arm("GN", shift_rate=SMALL**-2),
    "GN k=0.21 slow shifts": Arm("GN", scale=SMALL, shift_rate=SMALL**2),
}


class UnitVarianceWhitening(GroupWhitening2d):
    """Group Whitening whose output has the variance 1 in each image, before scale and shift."""

    fuses_relu = False

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        assert self.weight is not None and self.bias is not None and not relu
        y = whiten(x, None, None, self.num_groups, self.solver, False)
        y = y / y.square().mean((1, 2, 3), keepdim=True).sqrt()
        return self.weight[:, None, None] * y + self.bias[:, None, None]


class Scale(nn.Module):
    """Multiply a parameter by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        return self.factor * weight


class ScaleTrainer(Trainer):
    """The trainer of an arm."""

    arm: Arm

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        model = super().build_model(cfg)
        for layer in norms_of(model):
            if cls.arm.unit_variance:
                layer.__class__ = UnitVarianceWhitening
            if cls.arm.scale != 1:
                scale = Scale(cls.arm.scale)
                parametrize.register_parametrization(layer, "weight", scale)
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        """Give scaled parameters the weight decay of norms, and shifts their learning rate."""
        optimizer = super().build_optimizer(cfg, model)
        scales = {
            parameter
            for name, parameter in model.named_parameters()
            if name.endswith("parametrizations.weight.original")
        }
        shifts = {layer.bias for layer in norms_of(model)}

        groups = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own = {**group, "params": [parameter]}
                if parameter in scales:
                    own["weight_decay"] = cfg.SOLVER.WEIGHT_DECAY_NORM
                if parameter in shifts:
                    own["lr"] *= cls.arm.shift_rate
                groups.append(own)
        optimizer.param_groups = groups
        return optimizer


def norms_of(model: nn.Module) -> list[nn.Module]:
    """Return the norms of the ResNet."""
    layers = model.get_submodule("backbone.bottom_up").modules()
    return [layer for layer in layers if norm_spec(layer)]


def train_arm(
    config: str, data: tuple[str, str, str], arm: Arm, seed: int, folder: Path
) -> float:
    """Train an arm with a seed, and return its AP."""
    name = Path(config).stem
    iterations, rate = SCHEDULES[name]
    is_slow = name == "nuclei" and arm.norm == "BN"
    keys = {
        "MODEL.RESNETS.NORM": arm.norm,
        "MODEL.RESNETS.CONV": arm.conv,
        "SOLVER.BASE_LR": rate / 2 if is_slow else rate,
        "SEED": seed,
        "OUTPUT_DIR": str(folder),
    }
    trainer_class = type("ArmTrainer", (ScaleTrainer,), {"arm": arm})
    return train(config, data, iterations, keys, trainer_class)


def main(
    config: str,
    train_json: str,
    test_json: str,
    images: str,
    results: str,
    output: str,
    seeds: str,
    *arms: str,
) -> None:
    name = Path(config).stem
    data = (train_json, test_json, images)
    file = ResultsFile(results, KEYS, VALUES)
    for seed in seeds.split(","):
        for arm in arms or ARMS:
            folder = Path(output, f"{name}_{list(ARMS).index(arm)}_{seed}")
            run = functools.partial(
                train_arm, config, data, ARMS[arm], int(seed), folder
            )
            file.score((name, arm, seed), run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
