"""Redraw figures of the whitening papers, and measure a model and its whitening layers.

Each analysis writes a figure (.png), a table (.csv) and its settings and findings (.json) to the folder --output.
"""

import argparse
import importlib
import sys
from pathlib import Path

from tabulate import tabulate

from ..analysis import AnalysisResult, analyze_constraints, analyze_layers
from ..cli import check_folder, new_parser, parse_seed
from ..config import read_config
from ..model_zoo import get_config_file

ROOT = Path(__file__).resolve().parents[2]  # the clone, which has experiments/
MODEL = get_config_file("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml")
SMALL_MODEL = get_config_file("quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml")

# modules of experiments/, which is not part of the installed package
EXPERIMENTS = {
    "conditioning": "condition numbers of features normalized by GN, GW and BN, over the number of groups",
    "diversity": "histograms and diversity of features normalized by GN and BN over few channels or examples",
    "swapping": "training with PCA and ZCA whitening, and the axes that PCA swaps",
    "padding": "features and AP of a trained detector on single images and on padded batches",
    "tiling": "features and AP of a trained detector on whole images and on their tiles",
}


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Show the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        no_value = action.default is None or action.default is False
        return action.help if no_value else super()._get_help_string(action)


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool; defaults are the paper's values where it has one."""
    available = EXPERIMENTS if (ROOT / "experiments").is_dir() else {}
    parser = new_parser(
        __doc__,
        "layers --config-file output/demo/config.yaml --weights output/demo/model_final.pth",
        "constraints --config-file output/demo/config.yaml",
        note="" if available else f"In a clone of the repository only: {', '.join(EXPERIMENTS)}.",
    )
    analyses = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        sub = analyses.add_parser(name, help=summary, description=summary, formatter_class=_Defaults)
        sub.add_argument("--output", default="output/analysis", metavar="DIR", help="output folder")
        return sub

    sub = add("constraints", "number of constraints of a norm, by Table 1 and for the layers of a config")
    sub.add_argument("--neurons", type=int, default=256, help="d of the table")
    sub.add_argument("--batch-size", type=int, default=1024, help="m of the table")
    sub.add_argument("--groups", type=int, default=16, help="g of the table")
    sub.add_argument("--examples", type=int, default=0, help="N, the size of a training set; 0: one batch")
    sub.add_argument("--config-file", default=MODEL, metavar="FILE", help="config of the model; '' leaves it out")
    sub.add_argument("--height", type=int, default=800, help="of the model's images, in pixels")
    sub.add_argument("--width", type=int, default=1333, help="of the model's images, in pixels")
    sub.add_argument("--images", type=int, default=2, help="images per GPU")
    _add_opts(sub)

    sub = add("layers", "eigenvalues, condition numbers and residuals of a model's whitening layers on images")
    sub.add_argument("--config-file", default=SMALL_MODEL, metavar="FILE", help="config of the model")
    sub.add_argument("--weights", metavar="FILE", help="weights, if not MODEL.WEIGHTS of the config")
    sub.add_argument("--images", metavar="DIR", help="folder of images, if not synthetic ones")
    sub.add_argument("--count", type=int, default=2, help="number of images")
    sub.add_argument("--samples", type=int, default=8, help="largest number of samples of a layer per image")
    sub.add_argument("--seed", type=parse_seed, default=0, help="of random weights and synthetic images")
    sub.add_argument(
        "--allow-partial",
        action="store_true",
        help="accept weights that lack layers, which stay random, and weights of other norms",
    )
    _add_opts(sub)

    if available:
        sys.path.insert(0, str(ROOT))
    for name, summary in available.items():
        importlib.import_module(f"experiments.{name}").add_arguments(add(name, summary))
    return parser


def _add_opts(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change")


def analyze(args: argparse.Namespace) -> AnalysisResult:
    """Run the analysis of the command line."""
    options = {key: value for key, value in vars(args).items() if key not in ("analysis", "output")}
    if args.analysis in EXPERIMENTS:
        module = importlib.import_module(f"experiments.{args.analysis}")
        if options.pop("reduced"):
            options |= module.REDUCED
        return getattr(module, f"analyze_{args.analysis}")(**options)
    config_file, opts = options.pop("config_file"), options.pop("opts")
    if args.analysis == "constraints":
        return analyze_constraints(read_config(config_file, opts) if config_file else None, **options)
    weights = options.pop("weights")
    cfg = read_config(config_file, [*opts, *(["MODEL.WEIGHTS", weights] if weights else [])])
    return analyze_layers(cfg, options.pop("images"), **options)


def main(args: argparse.Namespace) -> None:
    """Run an analysis, write its files and print its table and findings."""
    check_folder(args.output)  # before minutes of work
    result = analyze(args)
    if "loaded" in result.settings:
        print(f"{result.settings['weights']}: {result.settings['loaded']}\n")
    picture, table, notes = result.write(args.output)
    if len(result.rows) <= 100:
        print(tabulate(result.rows, headers="keys"), "\n")
    for statement, holds in result.findings.items():
        print(f"{'yes' if holds else 'NO '}  {statement}")
    print(f"\nFigure: {picture}\nNumbers: {table}\nSettings and findings: {notes}")
