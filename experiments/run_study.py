"""Run the small-batch study (experiments/small_batch/study.md), or continue it.

Each run is a process with one thread. A finished run is one line of --results and is never run again; an interrupted
one continues from its checkpoint. Runs at other batch sizes are known when the learning rates at 2 images are chosen.
"""

import argparse
import functools
import shlex
import sys
from pathlib import Path

from benchmarks.environment import select_device
from benchmarks.table import write_csv
from gw_detectron.cli import check_folder, errors_reported
from gw_detectron.errors import ConfigError

from .small_batch.iteration_time import measure_times
from .small_batch.plan import DECIDING_BATCH, OTHER_BATCHES
from .small_batch.results_file import read_results
from .small_batch.side_by_side import estimate_hours, open_rows, run_rows, start_row

_ROOT = Path(__file__).resolve().parent.parent
_TIMED_ROUNDS = 20


def get_parser() -> argparse.ArgumentParser:
    """Build the parser of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--jobs", type=int, default=2, metavar="N", help="runs side by side, default: %(default)s")
    add("--only", nargs="+", default=[], metavar="PATTERN", help="names of runs, such as 'GW_b2_*'; default: all")
    add("--time", type=Path, metavar="CSV", help="time a training iteration of every norm, write a table, and exit")
    batches = sorted((DECIDING_BATCH, *OTHER_BATCHES))
    add("--batch", type=int, choices=batches, default=DECIDING_BATCH, help="images per iteration of --time, default: 2")
    add("--dry-run", action="store_true", help="list the known runs that are left, and their time")
    add("--results", type=Path, default=_ROOT / "experiments/small_batch/results.jsonl", help="default: %(default)s")
    add("--output", type=Path, default=_ROOT / "output" / "small_batch", help="folder of logs, default: %(default)s")
    add("--device", default="cpu", metavar="cpu|cuda", help="default: %(default)s")
    return parser


def main(args: argparse.Namespace) -> bool:
    """Run or list the study; return False if a run failed."""
    if args.jobs < 1:
        raise ConfigError(f"--jobs ({args.jobs}): too few. Fix: give 1 or more.")
    results = read_results(args.results)
    rows = open_rows(results, args.only)
    if args.only and not rows and not open_rows({}, args.only):
        raise ConfigError(f"--only ({' '.join(args.only)}): no run has such a name. Fix: see the names with --dry-run.")
    if args.dry_run:
        hours = estimate_hours(rows, results, args.jobs)
        print("\n".join(row.name for row in rows))
        print(f"{len(rows)} runs left, {'time unknown before the first result' if hours is None else f'{hours:.1f} h'}")
        return True
    if args.time:
        table = measure_times(select_device(args.device), _TIMED_ROUNDS, f"python {shlex.join(sys.argv)}", args.batch)
        write_csv(table, args.time)
        return True
    check_folder(args.output)
    start = functools.partial(
        start_row, output=args.output, results=args.results, options=("MODEL.DEVICE", args.device)
    )
    failed = run_rows(args.results, start, args.jobs, args.only, functools.partial(print, flush=True))
    return not failed


if __name__ == "__main__":
    with errors_reported():
        sys.exit(0 if main(get_parser().parse_args()) else 1)
