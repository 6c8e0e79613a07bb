r"""Fine-tune detectors of blood cells: parts 2b and 2c of PLAN.md.

python -m experiments.bn_weights.finetune SETTING TRAIN.json CHOOSE.json TEST.json IMAGES WEIGHTS RESULTS.csv OUTPUT \
    ARM ...

WEIGHTS names the files of convert_run.py and adapt_run.py, "output/{norm}_{seed}.pth". Runs with seed 0 choose the
learning rate of an arm on CHOOSE; the others are scored on TEST. Rows that the file has already are not trained again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gw_detectron.workbench.compare.plan import SEARCH_SEED, norm_keys

from ..study import ResultsFile, climb, score_arms, train

KEYS = ("data", "arm", "rate", "seed")
VALUES = ("AP", "seconds")
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Setting:
    """A config, the length of a training, and the learning rates of which one is chosen."""

    config: str
    iterations: int
    rates: tuple[float, ...]


SETTINGS = {
    "nuclei, boxes": Setting(
        "experiments/bn_weights/nuclei_boxes.yaml", 200, (0.005, 0.01, 0.02, 0.04)
    ),
    "bccd, more photos": Setting(
        "experiments/real_images/bccd.yaml", 100, (0.0025, 0.005, 0.01, 0.02)
    ),
}


@dataclass(frozen=True)
class Arm:
    """Norms of the backbone as ``compare`` names them, and the file of its start weights, "" for none."""

    norms: str
    weights: str = "bn"


ARMS = {
    "FrozenBN": Arm("FrozenBN"),
    "FrozenBN, trainable": Arm("FrozenBN+MixGW:alpha=0@S1-B1"),
    "MixGW 0.5": Arm("FrozenBN+MixGW@S1-B1"),
    "mean 0.5": Arm("FrozenBN+MixGW:alpha=0,mean=0.5@S1-B1"),
    "MixBN 0.5": Arm("FrozenBN+MixBN@S1-B1"),
    "GW, converted": Arm("FrozenBN+GW@S1-B1", "gw"),
    "GW:iters=2, from scratch": Arm("GW:iters=2", ""),
    "FrozenBN, adapted": Arm("FrozenBN", "adapted"),
}


def keys_of(arm: Arm, weights: str, seed: int) -> dict[str, Any]:
    """Return the config keys of an arm."""
    keys: dict[str, Any] = {"MODEL.BACKBONE.FREEZE_AT": 0, **norm_keys(arm.norms)}
    if arm.weights:
        # the search begins from the first weights
        number = 1 if seed == SEARCH_SEED else seed
        keys["MODEL.WEIGHTS"] = weights.format(norm=arm.weights, seed=number)
    return keys


def main(
    name: str,
    train_json: str,
    choose_json: str,
    test_json: str,
    images: str,
    weights: str,
    results: str,
    output: str,
    *arms: str,
) -> None:
    setting = SETTINGS[name]

    def run(data: str, arm: str, rate: float, seed: int) -> float:
        folder = Path(output, f"{data}_{list(ARMS).index(arm)}_{rate}_{seed}")
        keys = {
            **keys_of(ARMS[arm], weights, seed),
            "SOLVER.BASE_LR": rate,
            "SEED": seed,
            "OUTPUT_DIR": str(folder),
        }
        val_json = choose_json if seed == SEARCH_SEED else test_json
        files = (train_json, val_json, images)
        return train(setting.config, files, setting.iterations, keys)

    file = ResultsFile(results, KEYS, VALUES)
    keys = [(name, arm) for arm in arms or ARMS]
    score_arms(file, keys, run, setting.rates, SEEDS, climb)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
