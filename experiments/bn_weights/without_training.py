"""Score trained BN detectors on changed photos, with the photo's statistics mixed in: part 1 of PLAN.md.

python -m experiments.bn_weights.without_training BCCD OUTPUT.csv RUN ...

Rows that the file has already are not computed again.
"""

import contextlib
import io
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from detectron2.data.datasets import register_coco_instances
from detectron2.evaluation import COCOEvaluator
from torch import Tensor, nn

from gw_detectron import convert_norms
from gw_detectron.config import read_config
from gw_detectron.weights.loading import load_model

from ..study import ResultsFile

#: of RPN, in place of 1000: photos have at most 28 objects, and an evaluation takes 0.4 of the time
PROPOSALS = 300

#: arm -> norm name of the backbone's BN layers; "" leaves them
ARMS = {
    "BN": "",
    "mean 0.3": "MixGW:alpha=0,mean=0.3",
    "MixGW 0.1": "MixGW:alpha=0.1",
    "MixGW 0.3": "MixGW:alpha=0.3",
    "MixBN 0.3": "MixBN:alpha=0.3",
    "MixBN 0.5": "MixBN:alpha=0.5",
}


def contrast(x: Tensor, factor: float) -> Tensor:
    """Move pixels (3, H, W) towards the mean of the photo."""
    mean = x.mean()
    return mean + factor * (x - mean)


def cast(x: Tensor, strength: float) -> Tensor:
    """Take green and blue light away."""
    gains = torch.tensor([1, 1 - strength / 2, 1 - strength])
    return x * gains[:, None, None]


def stain(x: Tensor, strength: float) -> Tensor:
    """Mix the optical densities of the channels cyclically."""
    densities = -x.clamp_min(1 / 255).log()
    mixed = (1 - strength) * densities + strength * densities.roll(1, 0)
    return (-mixed).exp()


#: change -> function of RGB pixels from 0 to 1, and three strengths
CHANGES: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "clean": (lambda x, _: x, (0.0,)),
    "gamma": (lambda x, power: x**power, (0.75, 0.5, 0.35)),
    "contrast": (contrast, (0.7, 0.5, 0.3)),
    "cast": (cast, (0.15, 0.3, 0.45)),
    "stain": (stain, (0.2, 0.4, 0.6)),
    "brightness": (lambda x, shift: x + shift, (0.1, 0.2, 0.3)),
}


def changed(
    inputs: list[dict[str, Any]], change: str, strength: float, bgr: bool
) -> list[dict[str, Any]]:
    """Return a batch of Detectron2 with changed pixels."""
    apply, _ = CHANGES[change]
    batch = []
    for image in inputs:
        pixels = image["image"].float() / 255
        pixels = pixels.flip(0) if bgr else pixels
        pixels = apply(pixels, strength).clamp(0, 1)
        pixels = pixels.flip(0) if bgr else pixels
        batch.append({**image, "image": (255 * pixels).round()})
    return batch


def models_of(cfg: CfgNode) -> dict[str, nn.Module]:
    """Return the detector of a config with each arm's norms."""
    models = {}
    for arm, norm in ARMS.items():
        models[arm] = load_model(cfg)
        if norm:
            backbone = models[arm].get_submodule("backbone.bottom_up")
            convert_norms(backbone, {"*": norm})
    return models


def score(
    model: nn.Module, batches: list, evaluator: COCOEvaluator, task: str = "bbox"
) -> float:
    """Return the AP of a detector."""
    evaluator.reset()
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        for batch in batches:
            evaluator.process(batch, model(batch))
        return evaluator.evaluate()[task]["AP"]


def score_run(data: str, run: Path, file: ResultsFile) -> None:
    """Write the AP of a detector with each arm, change and strength that the file lacks."""
    cfg = read_config(run / "config.yaml")
    cfg.MODEL.WEIGHTS = str(run / "model_final.pth")
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = PROPOSALS
    inputs = list(build_detection_test_loader(cfg, data, num_workers=0))
    evaluator = COCOEvaluator(data, ("bbox",), False, use_fast_impl=False)

    models = models_of(cfg)
    for change, (_, strengths) in CHANGES.items():
        for strength in strengths:
            left = [
                arm for arm in ARMS if (run.name, arm, change, strength) not in file
            ]
            if not left:
                continue
            batches = [
                changed(batch, change, strength, cfg.INPUT.FORMAT == "BGR")
                for batch in inputs
            ]
            for arm in left:
                ap = score(models[arm], batches, evaluator)
                # no detection: empty
                text = round(ap, 2) if math.isfinite(ap) else ""
                file.append(run.name, arm, change, strength, text)


def main(folder: str, output: str, *runs: str) -> None:
    data = "changed_photos"
    register_coco_instances(data, {}, f"{folder}/test.json", f"{folder}/images")
    file = ResultsFile(output, ("run", "arm", "change", "strength"), ("AP",))
    for run in runs:
        score_run(data, Path(run), file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
