#!/usr/bin/env python
"""Redraws the figures and tables of the whitening papers that need no ImageNet, and looks into the layers of a model.

Each analysis writes a picture, a table of its numbers, and its settings with what it found, to the folder --output.
"""

import argparse
import sys
from pathlib import Path

from tabulate import tabulate

from gw_detectron.analysis import (
    Outcome,
    analyze_constraints,
    analyze_layers,
)
from gw_detectron.analysis.outcome import check_folder
from gw_detectron.config import read_config
from gw_detectron.engine.launch import errors_reported
from gw_detectron.model_zoo import get_config_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/ is not part of the package
from experiments.conditioning import analyze_conditioning
from experiments.diversity import analyze_diversity
from experiments.swapping import analyze_swapping

MODEL = get_config_file("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml")
SMALL_MODEL = get_config_file("quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml")


def get_parser() -> argparse.ArgumentParser:
    """Returns the parser of this tool; the default of every number is the paper's, if it has one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    analyses = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        sub = analyses.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.add_argument("--output", default="output/analysis", metavar="DIR", help="the folder to write to")
        return sub

    def add_random(sub: argparse.ArgumentParser, reduced: str) -> None:
        sub.add_argument("--seed", type=_seed, default=0, help="of everything random")
        sub.add_argument("--reduced", action="store_true", help=f"seconds instead of minutes: {reduced}")

    sub = add("constraints", "how many constraints a norm puts on features, by Table 1 and for the layers of a config")
    sub.add_argument("--neurons", type=int, default=256, help="d of the table")
    sub.add_argument("--batch-size", type=int, default=1024, help="m of the table")
    sub.add_argument("--groups", type=int, default=16, help="g of the table")
    sub.add_argument("--examples", type=int, default=0, help="N, the size of a training set; 0: one batch")
    sub.add_argument("--config-file", default=MODEL, metavar="FILE", help="the model; an empty word leaves it out")
    sub.add_argument("--height", type=int, default=800, help="of the model's images, in pixels")
    sub.add_argument("--width", type=int, default=1333, help="of the model's images, in pixels")
    sub.add_argument("--images", type=int, default=2, help="images of a GPU")
    _add_opts(sub)

    sub = add("conditioning", "condition numbers of features normalised by GN, GW, BN, over the number of groups")
    sub.add_argument("--neurons", type=int, default=256, help="d")
    sub.add_argument("--examples", type=int, default=1024, help="m")
    sub.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 4], help="depths of the MLP")
    sub.add_argument("--repeats", type=int, default=5, help="random networks, of which the median is shown")
    add_random(sub, "one and two layers, 1 repeat")

    sub = add("diversity", "histograms and diversity of features normalised by GN and BN over few channels or examples")
    sub.add_argument("--examples", type=int, default=1_680_000, help="N")
    sub.add_argument("--bins", type=int, default=1000, help="T, along each of two dimensions")
    sub.add_argument("--pairs", type=int, default=4, help="sampled pairs of dimensions")
    add_random(sub, "96,000 examples, 200 bins")

    sub = add("layers", "eigenvalues, condition numbers and residuals of the whitening layers of a model on images")
    sub.add_argument("--config-file", default=SMALL_MODEL, metavar="FILE", help="the yaml of the model")
    sub.add_argument("--weights", metavar="FILE", help="MODEL.WEIGHTS, if not those of the config")
    sub.add_argument("--images", metavar="DIR", help="a folder of images, if not synthetic ones")
    sub.add_argument("--count", type=int, default=2, help="images")
    sub.add_argument("--samples", type=int, default=8, help="the most samples of a layer, for each image")
    sub.add_argument("--seed", type=_seed, default=0, help="of random weights and synthetic images")
    sub.add_argument(
        "--allow-partial",
        action="store_true",
        help="let the layers that the weights do not have be random, and accept other norms than theirs",
    )
    _add_opts(sub)

    sub = add("swapping", "training behind PCA and ZCA whitening, and the axes that swap behind PCA")
    sub.add_argument("--depths", type=int, nargs="+", default=[2, 4], help="layers of the MLPs")
    sub.add_argument("--neurons", type=int, default=100, help="of every hidden layer")
    sub.add_argument("--examples", type=int, default=2000, help="in the training set")
    sub.add_argument("--steps", type=int, default=200, help="of gradient descent")
    sub.add_argument("--batch-size", type=int, default=0, help="examples of a step; 0: all")
    add_random(sub, "40 neurons, 600 examples, 60 steps")
    return parser


def _seed(word: str) -> int:
    if not word.isdecimal() or int(word) >= 2**32:
        raise argparse.ArgumentTypeError(f"{word} is no seed; it has to be a whole number from 0 to {2**32 - 1}")
    return int(word)


def _add_opts(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change")


REDUCED = {
    "conditioning": {"layers": [1, 2], "repeats": 1},
    "diversity": {"examples": 96_000, "bins": 200},
    "swapping": {"neurons": 40, "examples": 600, "steps": 100},
}


def analyze(args: argparse.Namespace) -> Outcome:
    """Runs the analysis that the command line asks for."""
    options = dict(vars(args))
    name = options.pop("analysis")
    options.pop("output")
    if options.pop("reduced", False):
        options |= REDUCED[name]
    if name in ("constraints", "layers"):
        config_file, opts = options.pop("config_file"), options.pop("opts")
        if name == "layers":
            weights = options.pop("weights")
            cfg = read_config(config_file, [*opts, *(["MODEL.WEIGHTS", weights] if weights else [])])
            return analyze_layers(cfg, options.pop("images"), **options)
        return analyze_constraints(read_config(config_file, opts) if config_file else None, **options)
    by_name = {
        "conditioning": analyze_conditioning,
        "diversity": analyze_diversity,
        "swapping": analyze_swapping,
    }
    return by_name[name](**options)


def main(args: argparse.Namespace) -> None:
    """Writes the outcome of an analysis and prints what it says."""
    check_folder(args.output)  # not only after minutes
    outcome = analyze(args)
    if "loaded" in outcome.settings:
        print(f"{outcome.settings['weights']}: {outcome.settings['loaded']}\n")
    files = outcome.write(args.output)
    if len(outcome.rows) <= 100:
        print(tabulate(outcome.rows, headers="keys"), "\n")
    for sentence, holds in outcome.findings.items():
        print(f"{'yes' if holds else 'NO '}  {sentence}")
    print(f"\nLook at {files[0]}; the numbers are in {files[1]}, the settings in {files[2]}.")


if __name__ == "__main__":
    with errors_reported():
        main(get_parser().parse_args())
