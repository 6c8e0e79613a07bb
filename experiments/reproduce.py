"""Train the rows of a table of MODEL_ZOO.md one after the other, or continue them; list their AP.

Each row is a run of tools/train_net.py in its own folder. A finished row is not run again, an interrupted one continues
from its checkpoint, and a failed one does not stop the others.
"""

import argparse
import functools
import sys
from pathlib import Path

from gw_detectron.cli import check_folder, errors_reported, new_parser
from gw_detectron.errors import ConfigError

from .zoo_rows import run_table, select_rows, state_of


def get_parser() -> argparse.ArgumentParser:
    """Build the parser of this tool."""
    parser = new_parser(
        __doc__,
        "--table 4 --gpus 8",
        "--table 4 --rows '*_4conv1fc_*' --dry-run",
    )
    add = parser.add_argument
    add("--table", required=True, metavar="NAME", help='the paper\'s number, or a part of a heading; "" for all tables')
    add("--rows", nargs="+", default=[], metavar="PATTERN", help="file names of configs, such as '*_GW'; default: all")
    add("--gpus", type=int, default=8, metavar="N", help="of each run, default: %(default)s; 0 runs on the CPU")
    add("--output", type=Path, default=Path("output", "reproduce"), metavar="DIR", help="default: %(default)s")
    add("--zoo", type=Path, default=Path("MODEL_ZOO.md"), metavar="FILE", help="default: %(default)s")
    add("--dry-run", action="store_true", help="run nothing; list the rows, their state and AP")
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change in all runs")
    return parser


def main(args: argparse.Namespace) -> bool:
    """Run or list rows; return False if a run failed."""
    if args.gpus < 0:
        raise ConfigError(f"--gpus ({args.gpus}): negative. Fix: give 0 or more.")
    rows = select_rows(args.zoo, args.table, args.rows)
    if args.dry_run:
        print("\n".join(f"{row.name}: {state_of(row, args.output)}" for row in rows))
        return True
    check_folder(args.output)
    failed = run_table(rows, args.output, args.gpus, args.opts, functools.partial(print, flush=True))
    if failed:
        print(f"{len(failed)} of {len(rows)} rows failed: {', '.join(row.name for row in failed)}")
    return not failed


if __name__ == "__main__":
    with errors_reported():
        sys.exit(0 if main(get_parser().parse_args()) else 1)
