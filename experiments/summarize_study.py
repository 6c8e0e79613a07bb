"""Write the tables and figures of the small-batch study (experiments/small_batch/study.md) from its results."""

import argparse
from pathlib import Path

from benchmarks.table import read_csv
from gw_detectron.cli import check_folder, errors_reported
from gw_detectron.errors import MissingFileError

from .small_batch.results_file import read_results
from .small_batch.results_page import write_summary

STUDY = Path("experiments", "small_batch")


def get_parser() -> argparse.ArgumentParser:
    """Build the parser of this tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--results", type=Path, default=STUDY / "results.jsonl", help="default: %(default)s")
    add("--times", type=Path, default=STUDY / "times.csv", help="of run_study.py --time, default: %(default)s")
    add("--output", type=Path, default=STUDY, help="folder of the page and its figures, default: %(default)s")
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the summary and print its files."""
    results = read_results(args.results)
    if not results:
        raise MissingFileError(f"--results ('{args.results}'): no results. Fix: run experiments.run_study first.")
    check_folder(args.output)
    table = read_csv(args.times)
    times = {row["variant"]: row["median_ms"] or 0.0 for row in table.rows}
    for path in write_summary(results, times, args.output):
        print(path)


if __name__ == "__main__":
    with errors_reported():
        main(get_parser().parse_args())
