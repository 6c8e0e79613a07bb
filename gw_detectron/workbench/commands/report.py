"""Write a page about a run, with scores, curves and errors, or about several side by side."""

import argparse
from pathlib import Path

from ...errors import printable
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
    add(
        "--images",
        type=int,
        default=4,
        metavar="N",
        help="images of one run to draw; default: %(default)s",
    )
    add(
        "--score",
        type=float,
        help="lowest score of a drawn or counted box of one run; default: that of the highest F1",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the page; print where it is and what it lacks."""
    if args.output:
        check_folder(args.output)  # before minutes of work
    if len(args.runs) > 1:
        output = Path(args.output or "output/runs")
        write_side_by_side(args.runs, output)
        print(f"Report: {output / RUNS}")
        return

    (run,) = args.runs
    folder = Path(args.output or Path(run, "report"))
    numbers = write_report(run, images=args.images, score=args.score, output=folder)
    for entry in numbers["missing"]:
        print(printable(f"Missing: {', '.join(entry['parts'])}: {entry['reason']}"))
    for task, scores in numbers["summary"]["scores"].items():
        if scores["AP"] is not None:
            print(f"{task} AP {scores['AP']:.1f}")
    errors = numbers.get("errors", {})
    if errors.get("best_f1"):
        shown = (
            "these boxes; --score changes that"
            if args.score is None
            else f"scores from {args.score:g} (--score)"
        )
        print(
            f"Highest F1: {errors['best_f1']:.2f}, for scores above {errors['best_threshold']:.3g}. The page shows "
            f"{shown}."
        )
    print(f"Report: {folder / PAGE}")
