"""Write a page about a run, with scores, curves and errors, or about several side by side."""

import argparse
from pathlib import Path

from ...errors import ConfigError, printable
from ..console import check_folder
from ..report import PAGE, write_report
from ..report.comparison_page import PAGE as RUNS
from ..report.comparison_page import write_side_by_side
from .parsers import MixedParser, new_parser


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__,
        "output/demo",
        "output/mydata --images 8 --score 0.3",
        "output/gn output/gw --output pages",
        kind=MixedParser,
    )

    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder; several to compare them")
    add(
        "--output",
        metavar="DIR",
        help="folder to write; default: RUN/report, of several runs output/runs",
    )
    add("--images", type=int, metavar="N", help="images to draw; default: 4")
    add(
        "--score",
        type=float,
        help="lowest score of a drawn or counted box; default: 0.5",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the page; print where it is and what it lacks."""
    if args.output:
        check_folder(args.output)  # before minutes of work
    options = {"images": args.images, "score": args.score}
    options = {name: value for name, value in options.items() if value is not None}
    if len(args.runs) == 1:
        _report(args.runs[0], args.output, options)
        return

    if options:
        raise ConfigError(
            "--images, --score: only for the report of one run. Fix: leave them out."
        )
    output = Path(args.output or "output/runs")
    write_side_by_side(args.runs, output)
    print(f"Report: {output / RUNS}")


def _report(run: str, output: str | None, options: dict) -> None:
    folder = Path(output or Path(run, "report"))
    numbers = write_report(run, **options, output=folder)
    for entry in numbers["missing"]:
        print(printable(f"Missing: {', '.join(entry['parts'])}: {entry['reason']}"))
    for task, scores in numbers["summary"]["scores"].items():
        if scores["AP"] is not None:
            print(f"{task} AP {scores['AP']:.1f}")
    print(f"Report: {folder / PAGE}")
