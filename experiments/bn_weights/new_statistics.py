"""Score BN detectors with statistics of the new place, and with each photo's mixed in: part 1c of PLAN.md.

python -m experiments.bn_weights.new_statistics TEST.json NEW.json IMAGES RESULTS.csv RUN ...

The photos of TEST are scored; statistics are those of photos of NEW with the same change, whose labels are not used.
Rows that the file has already are not computed again.
"""

import functools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.evaluation import COCOEvaluator

from gw_detectron import convert_norms
from gw_detectron.weights.loading import load_model, open_detector

from ..study import ResultsFile
from .adapt_run import adapt_to
from .without_training import CHANGES, PROPOSALS, changed, score

Photos = list[dict[str, Any]]

MIXTURE = "MixBN:alpha=0.5"
#: arm -> photos of the new place, whether each photo's statistics are mixed in
ARMS = {
    "as it is": (0, False),
    "mixed": (0, True),
    "32 photos": (32, False),
    "8 photos": (8, False),
    "32 photos, mixed": (32, True),
}


def score_arm(
    cfg: CfgNode, arm: str, tested: Photos, new: Photos, evaluator: COCOEvaluator
) -> float:
    """Return the AP of a detector on photos of a place, for which it may know other photos of it."""
    count, is_mixed = ARMS[arm]
    model = load_model(cfg)
    if count:
        adapt_to(model, new[:count])
    if is_mixed:
        convert_norms(model.get_submodule("backbone.bottom_up"), {"*": MIXTURE})
    return score(model, [[photo] for photo in tested], evaluator)


def score_run(tested: str, new: str, run: str, file: ResultsFile) -> None:
    """Write the AP of a detector with each arm, unchanged and with the middle strength of each change."""
    cfg = open_detector(run).cfg
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = PROPOSALS
    photos = {}
    for data in (tested, new):
        loader = build_detection_test_loader(cfg, data, num_workers=0)
        photos[data] = [photo for batch in loader for photo in batch]
    random.Random(0).shuffle(photos[new])
    evaluator = COCOEvaluator(tested, ("bbox",), False, use_fast_impl=False)

    is_bgr = cfg.INPUT.FORMAT == "BGR"
    for change, (_, strengths) in CHANGES.items():
        strength = strengths[len(strengths) // 2]
        tested_here, new_here = (
            changed(photos[data], change, strength, is_bgr) for data in (tested, new)
        )
        for arm in ARMS:
            file.score(
                (Path(run).name, arm, change, strength),
                functools.partial(
                    score_arm, cfg, arm, tested_here, new_here, evaluator
                ),
            )


def main(test_json: str, new_json: str, images: str, results: str, *runs: str) -> None:
    register_coco_instances("scored_photos", {}, test_json, images)
    register_coco_instances("new_photos", {}, new_json, images)
    keys = ("run", "arm", "change", "strength")
    file = ResultsFile(results, keys, ("AP", "seconds"))
    for run in runs:
        score_run("scored_photos", "new_photos", run, file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
