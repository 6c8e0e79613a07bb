"""Redraw figures of the whitening papers, and measure a trained detector.

Each analysis writes a figure (.png), a table (.csv) and its settings and findings (.json) to the folder --output.
"""

import argparse
import importlib
from dataclasses import replace

from tabulate import tabulate

from gw_detectron.workbench.commands.parsers import new_parser
from gw_detectron.workbench.console import check_folder, errors_reported

from .analysis_result import AnalysisResult

ANALYSES = {
    "constraints": "number of constraints of a norm, by Table 1 and for the layers of a config",
    "conditioning": "condition numbers of features normalized by GN, GW and BN, over the number of groups",
    "swapping": "training with PCA and ZCA whitening, and the axes that PCA swaps",
    "padding": "features and AP of a trained detector on single images and on padded batches",
    "tiling": "AP and time of a trained detector on whole images and in tiles",
}


def get_parser() -> argparse.ArgumentParser:
    """Build the parser; defaults are the paper's values where it has one."""
    parser = new_parser(
        __doc__,
        "constraints --config-file output/demo/config.yaml",
        "padding --config-file output/demo/config.yaml --weights output/demo/model_final.pth",
    )
    parser.prog = "python -m experiments"
    analyses = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")
    for name, summary in ANALYSES.items():
        formatter = argparse.ArgumentDefaultsHelpFormatter
        sub = analyses.add_parser(
            name, help=summary, description=summary, formatter_class=formatter
        )
        sub.add_argument(
            "--output", default="output/analysis", metavar="DIR", help="output folder"
        )
        importlib.import_module(f"experiments.{name}").add_arguments(sub)
    return parser


def analyze(args: argparse.Namespace) -> AnalysisResult:
    """Run the analysis of the command line; its options are settings of the result."""
    options = dict(vars(args))
    name = options.pop("analysis")
    del options["output"]
    module = importlib.import_module(f"experiments.{name}")
    if options.pop("reduced", False):
        options |= module.REDUCED
    result = getattr(module, f"analyze_{name}")(**options)
    return replace(result, settings={**options, **result.settings})


def main(args: argparse.Namespace) -> None:
    """Run an analysis, write its files and print its table and findings."""
    check_folder(args.output)  # before minutes of work
    result = analyze(args)
    picture, table, notes = result.write(args.output)
    if len(result.rows) <= 100:
        print(tabulate(result.rows, headers="keys"), "\n")
    for statement, holds in result.findings.items():
        print(f"{'yes' if holds else 'NO '}  {statement}")
    print(f"\nFigure: {picture}\nNumbers: {table}\nSettings and findings: {notes}")


if __name__ == "__main__":
    with errors_reported():
        main(get_parser().parse_args())
