"""Write a report of a run: one page with scores, curves and pictures of errors; or of several runs, side by side."""

import argparse
from pathlib import Path

from ...errors import ConfigError
from ..report import PAGE, write_report
from ..report.side_by_side import PAGE as RUNS
from ..report.side_by_side import write_side_by_side
from .parsers import MixedParser, new_parser


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    examples = (
        "output/demo",
        "output/mydata --images 8 --score 0.3",
        "output/gn output/gw --output pages",
    )
    parser = new_parser(__doc__, *examples, kind=MixedParser)
    add = parser.add_argument
    add(
        "run_folders",
        nargs="+",
        metavar="RUN_FOLDER",
        help="OUTPUT_DIR of a run; several to compare them",
    )
    add(
        "--output",
        metavar="DIR",
        help="folder to write; default: RUN_FOLDER/report, of several runs output/runs",
    )
    add("--images", type=int, metavar="N", help="images to draw; default: 4")
    add("--score", type=float, help="lowest score of a drawn or counted box; default: 0.5")
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the report; print where it is and what it lacks."""
    first = Path(args.run_folders[0])
    lines: list[str] = []
    shown = {
        name: value
        for name in ("images", "score")
        if (value := getattr(args, name)) is not None
    }
    if len(args.run_folders) > 1:
        if shown:
            raise ConfigError(
                "--images, --score: only for the report of one run. Fix: leave them out."
            )
        page = Path(args.output or "output/runs", RUNS)
        write_side_by_side(args.run_folders, page.parent)
    else:
        page = Path(args.output or first / "report", PAGE)
        numbers = write_report(first, **shown, output=page.parent)
        lines = [
            f"Missing: {', '.join(entry['parts'])}: {entry['reason']}"
            for entry in numbers["missing"]
        ]
        scores = {task: each["AP"] for task, each in numbers["summary"]["scores"].items()}
        lines += [
            f"{task} AP {value:.1f}" for task, value in scores.items() if value is not None
        ]
    print("\n".join([*lines, f"Report: {page}"]))
