"""Score BN detectors on images of another kind: nuclei in fluorescence and in stained tissue; see PLAN.md, part 1.

python -m experiments.bn_weights.real_change NUCLEI RESULTS.csv OUTPUT SEEDS

NUCLEI is the folder of prepare.py. Rows that the file has already are not computed again.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.evaluation import COCOEvaluator

from gw_detectron.config import read_config

from ..real_images.prepare import part_of, type_of
from ..study import ResultsFile, train
from .without_training import models_of, score

TYPES = ("fluorescence", "stained tissue")
CONFIG = "experiments/real_images/nuclei.yaml"
ITERATIONS = 400
#: of BN in part B of the real images
RATE = 0.02


def write_types(data: Path, output: Path) -> None:
    """Write train.json and test.json of each type of image; a type's test images are those of val.json."""
    for part, source in (("train", "train.json"), ("test", "val.json")):
        content = json.loads((data / source).read_text())
        for name in TYPES:
            images = [
                image
                for image in content["images"]
                if type_of(data / "images" / image["file_name"]) == name
            ]
            path = output / f"{name}_{part}.json"
            path.write_text(json.dumps(part_of(content, images)))


def detector(data: Path, output: Path, name: str, seed: int) -> CfgNode:
    """Train a detector on the images of a type, unless it is there; return its config with its weights."""
    folder = output / f"{name}_{seed}"
    weights = folder / "model_final.pth"
    if not weights.exists():
        keys: dict[str, Any] = {
            "MODEL.RESNETS.NORM": "BN",
            "SOLVER.BASE_LR": RATE,
            "SEED": seed,
            "OUTPUT_DIR": str(folder),
        }
        train_json = str(output / f"{name}_train.json")
        test_json = str(output / f"{name}_test.json")
        files = (train_json, test_json, str(data / "images"))
        train(CONFIG, files, ITERATIONS, keys)
    cfg = read_config(folder / "config.yaml")
    cfg.MODEL.WEIGHTS = str(weights)
    return cfg


def main(folder: str, results: str, output: str, seeds: str) -> None:
    data, target = Path(folder), Path(output)
    target.mkdir(parents=True, exist_ok=True)
    write_types(data, target)
    for name in TYPES:
        json_file = str(target / f"{name}_test.json")
        register_coco_instances(name, {}, json_file, str(data / "images"))

    file = ResultsFile(results, ("trained", "seed", "tested", "arm"), ("AP", "seconds"))
    for seed in map(int, seeds.split(",")):
        for trained in TYPES:
            cfg = detector(data, target, trained, seed)
            models = models_of(cfg)
            for tested in TYPES:
                inputs = list(build_detection_test_loader(cfg, tested, num_workers=0))
                evaluator = COCOEvaluator(tested, ("segm",), False, use_fast_impl=False)
                for arm, model in models.items():
                    run = functools.partial(score, model, inputs, evaluator, "segm")
                    file.score((trained, seed, tested, arm), run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
