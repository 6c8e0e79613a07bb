"""Train the same detector with several norms, and say which one to take."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..compare import PAGE, RECOMMENDED, Comparison, compare
from ..console import check_folder
from ..run import RunRequest
from ..signals import Interrupted
from .parsers import new_parser
from .train import add_dataset_flags

_NOTE = """\
Each norm is trained from the same start with the same images. Short runs choose its learning rate;
the better half goes on to runs of twice the length. Then each norm is trained with several seeds:
for equal iterations, and for equal time. Norms replace those of the backbone; all else is as in the
config. The same command continues after an interruption."""


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__,
        "--config-file own_faster_rcnn_R_18_FPN_GN --train-json train.json --train-images photos "
        "--val-fraction 0.2 --norms BN GN GW --minutes 60 --num-gpus 0",
        "--config-file my.yaml --norms GN GW GN+WS BN+GW@S1-B1 --rates 0.005 0.01 0.02 --jobs 4 "
        "--iterations 2000",
        note=_NOTE,
    )
    add = parser.add_argument

    add(
        "--config-file",
        required=True,
        metavar="FILE",
        help="a yaml, or a name of `gw-detectron list configs`",
    )
    add(
        "--norms",
        nargs="+",
        required=True,
        metavar="NORM",
        help="such as BN GN GW GW:iters=3 GN+WS BN+GW@S1-B1",
    )
    add(
        "--output",
        type=Path,
        default=Path("output/compare"),
        metavar="DIR",
        help="default: %(default)s",
    )

    add(
        "--minutes",
        type=float,
        default=0.0,
        metavar="M",
        help="time for everything; decides iterations and seeds",
    )
    add(
        "--iterations",
        type=int,
        default=0,
        metavar="N",
        help="length of a scored run, instead of --minutes",
    )
    add(
        "--rates",
        nargs="+",
        type=float,
        default=[],
        metavar="LR",
        help="default: half, once and twice SOLVER.BASE_LR",
    )
    add(
        "--seeds",
        type=int,
        default=0,
        metavar="N",
        help="scored runs of a norm; default: 3, or what --minutes allows",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at the same time, spread over the GPUs; default: 1",
    )
    add(
        "--no-equal-time",
        dest="equal_time",
        action="store_false",
        help="compare equal iterations only",
    )
    add(
        "--num-gpus",
        type=int,
        default=1,
        metavar="N",
        help="0 runs on the CPU; 1: each run on one GPU",
    )
    add(
        "--auto",
        action="store_true",
        help="set what the data decide, as in `gw-detectron train --auto`",
    )
    add(
        "--ignore-preflight",
        action="store_true",
        help="start even if the pre-run checks fail",
    )

    add_dataset_flags(parser)
    add(
        "--test-json",
        metavar="FILE",
        help="score on these images; --val-json then only chooses the rates",
    )
    add(
        "--test-images",
        metavar="DIR",
        help="the folder of the photos of --test-json",
    )
    add(
        "opts",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help="config keys of all runs; they come last",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    """Run the comparison; print the advice and the files."""
    check_folder(args.output)
    base = replace(RunRequest.from_flags(args), minutes=None)  # those of all runs
    scored = None
    if args.test_json is not None or args.test_images is not None:
        scored = replace(
            base.data, val_json=args.test_json, val_images=args.test_images
        )
    what = Comparison(
        base,
        args.norms,
        args.output,
        scored=scored,
        rates=args.rates,
        iterations=args.iterations,
        minutes=args.minutes,
        seeds=args.seeds,
        jobs=args.jobs,
        equal_time=args.equal_time,
    )
    try:
        numbers = compare(what, partial(print, flush=True))
    except Interrupted as stop:
        stop.message += " The same command continues the comparison."
        raise

    print(f"\n{numbers['advice']}\n\nPage: {args.output / PAGE}")
    if numbers["recommended"]:
        print(f"Config to continue with: {args.output / RECOMMENDED}")
