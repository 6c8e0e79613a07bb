#!/usr/bin/env python
"""Converts ImageNet weights of a ResNet or ResNeXt to a Detectron2 backbone's, and writes the yaml for them."""

import argparse

from tabulate import tabulate

from gw_detectron.checkpoint import convert_file
from gw_detectron.engine.launch import errors_reported


def get_parser() -> argparse.ArgumentParser:
    """Returns the parser of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="SRC is a file of the authors, of torchvision or of timm. Nothing is written unless every tensor fits.",
    )
    parser.add_argument("source", metavar="SRC", help=".pth, .safetensors, or converted weights")
    parser.add_argument("target", metavar="DST", help="ends in .pkl (for MODEL.WEIGHTS) or .safetensors")
    parser.add_argument("--arch", help="what SRC has to be: R-50, X-101-32x8d, ...; recognised if not given")
    parser.add_argument("--positions", help="where whitening has to stand: S1-B2, ...; recognised if not given")
    parser.add_argument("--keep-fc", action="store_true", help="keep the classifier, as linear.*")
    parser.add_argument(
        "--pool-norm",
        metavar="NAME",
        help="with --keep-fc: the norm between the last pooling and the classifier, as in 'BW:channels=32,solver=zca'; "
        "guessed, with a warning, if not given",
    )
    parser.add_argument("--force", action="store_true", help="overwrite DST")
    return parser


def main(args: argparse.Namespace) -> None:
    """Converts, and prints what became of each tensor."""
    conversion = convert_file(
        args.source,
        args.target,
        architecture=args.arch,
        positions=args.positions,
        keep_fc=args.keep_fc,
        pool_norm=args.pool_norm,
        overwrite=args.force,
    )
    rows = [
        (row.source, row.target or "(dropped)", "x".join(map(str, row.shape)) or "-", row.note)
        for row in conversion.rows
    ]
    print(tabulate(rows, headers=["source", "target", "shape", "note"]))
    whitening = f"whitening at {conversion.positions}" if conversion.positions else "no whitening"
    before_fc = f"; before the classifier: {conversion.pool_norm}" if conversion.pool_norm else ""
    print(
        f"\n{args.target}: {len(conversion.tensors)} tensors of {conversion.architecture.name}, {conversion.norm}, "
        f"{whitening}{before_fc}. The .yaml beside it has the config keys that go with them."
    )


if __name__ == "__main__":
    with errors_reported():
        main(get_parser().parse_args())
