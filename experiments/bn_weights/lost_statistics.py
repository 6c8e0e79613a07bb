"""Mix statistics into detectors that have lost BN's, or that have those of other photos: part 1b of PLAN.md.

python -m experiments.bn_weights.lost_statistics TEST.json IMAGES RESULTS.csv RUN ...

The photos of TEST are scored. Rows that the file has already are not computed again.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.evaluation import COCOEvaluator
from torch import nn

from gw_detectron import convert_norms
from gw_detectron.norms.listing import is_norm
from gw_detectron.weights.loading import load_model, open_detector
from gw_detectron.workbench.run.bn_statistics import change_statistics

from ..study import ResultsFile
from .without_training import CHANGES, PROPOSALS, changed, score

#: share of the image in MixBN
SHARE = "0.5"


def keep(model: nn.Module, cfg: CfgNode) -> None:
    """Leave the detector as it is."""


def mix_with_own(model: nn.Module, cfg: CfgNode) -> None:
    """Mix with the statistics that the layers have."""
    backbone = model.get_submodule("backbone.bottom_up")
    convert_norms(backbone, {"*": f"MixBN:alpha={SHARE}"})


def mix_without(model: nn.Module, cfg: CfgNode) -> None:
    """Multiply the statistics into the scale, as in the detectors of Detectron2's zoo, then mix."""
    multiply_into_scale(model)
    mix_with_own(model, cfg)


def mix_with_measured(model: nn.Module, cfg: CfgNode) -> None:
    """Multiply the statistics into the scale, then mix as ``--mix`` does: with those of training photos."""
    multiply_into_scale(model)
    change_statistics(model, cfg, mix=SHARE, weights=cfg.MODEL.WEIGHTS)


ARMS: dict[str, Callable[[nn.Module, CfgNode], None]] = {
    "as it is": keep,
    "own statistics": mix_with_own,
    "no statistics": mix_without,
    "measured statistics": mix_with_measured,
}


@torch.no_grad()
def multiply_into_scale(model: nn.Module) -> None:
    """Give the backbone FrozenBN with mean 0 and variance 1 that computes the same function."""
    backbone = model.get_submodule("backbone.bottom_up")
    convert_norms(backbone, {"*": "FrozenBN"})
    layers: list[Any] = [layer for layer in backbone.modules() if is_norm(layer)]
    for layer in layers:
        scale = layer.weight / (layer.running_var + layer.eps).sqrt()
        layer.bias -= scale * layer.running_mean
        layer.weight.copy_(scale)
        layer.running_mean.zero_()
        layer.running_var.fill_(1 - layer.eps)


def score_run(data: str, run: str, file: ResultsFile) -> None:
    """Write the AP of a detector with each arm, unchanged and with the middle strength of each change."""
    cfg, _, checkpoint = open_detector(run)
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = PROPOSALS
    inputs = list(build_detection_test_loader(cfg, data, num_workers=0))
    evaluator = COCOEvaluator(data, ("bbox",), False, use_fast_impl=False)

    for arm, change_norms in ARMS.items():
        model = load_model(cfg, checkpoint=checkpoint)
        change_norms(model, cfg)
        for change, (_, strengths) in CHANGES.items():
            strength = strengths[len(strengths) // 2]
            batches = [
                changed(batch, change, strength, cfg.INPUT.FORMAT == "BGR")
                for batch in inputs
            ]
            file.score(
                (Path(run).name, arm, change, strength),
                functools.partial(score, model, batches, evaluator),
            )


def main(test_json: str, images: str, results: str, *runs: str) -> None:
    data = "scored_photos"
    register_coco_instances(data, {}, test_json, images)
    keys = ("run", "arm", "change", "strength")
    file = ResultsFile(results, keys, ("AP", "seconds"))
    for run in runs:
        score_run(data, run, file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
