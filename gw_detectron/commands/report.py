"""Write a report of a run: one page with scores, curves and pictures of errors."""

import argparse
import json
from pathlib import Path

from ..cli import new_parser
from ..report import PAGE, write_report


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(__doc__, "output/demo", "output/mydata --images 8 --score 0.3")
    parser.add_argument("run_folder", metavar="RUN_FOLDER", help="OUTPUT_DIR of a training or an evaluation")
    parser.add_argument("--output", metavar="DIR", help="folder of the report (default: RUN_FOLDER/report)")
    parser.add_argument("--images", type=int, default=4, metavar="N", help="images to draw (default: %(default)s)")
    parser.add_argument(
        "--score", type=float, default=0.5, help="lowest score of a drawn or counted box (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print report.json instead of a summary")
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the report; print where it is and what it lacks."""
    numbers = write_report(args.run_folder, images=args.images, score=args.score, output=args.output)
    if args.json:
        print(json.dumps(numbers, indent=2))
        return
    for entry in numbers["missing"]:
        print(f"Missing: {', '.join(entry['parts'])}: {entry['reason']}")
    for task, scores in numbers["summary"]["scores"].items():
        if scores["AP"] is not None:
            print(f"{task} AP {scores['AP']:.1f}")
    print(f"Report: {Path(args.output or Path(args.run_folder, 'report')) / PAGE}")
