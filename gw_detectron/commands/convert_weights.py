"""Convert ImageNet weights of a ResNet or ResNeXt for a Detectron2 backbone, and write the config they need."""

import argparse
import dataclasses
import json

from tabulate import tabulate

from ..cli import new_parser
from ..weights import convert_file
from ..weights.provenance import PREPROCESSING


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool."""
    parser = new_parser(
        __doc__,
        "resnet50_gw.pth R-50-GW.pkl --norm GW",
        "resnet50_gn.pth R-50-GN.safetensors --norm GN --arch R-50",
        note="SRC is a file of the authors, of torchvision or of timm. Nothing is written unless every tensor fits.",
    )
    parser.add_argument("source", metavar="SRC", help="a .pth or .safetensors file, or converted weights")
    parser.add_argument("target", metavar="DST", help="a .pkl (for MODEL.WEIGHTS) or .safetensors file to write")
    parser.add_argument("--arch", help="expected architecture: R-50, X-101-32x8d, ...; default: any")
    parser.add_argument("--positions", help="expected positions of the whitening norm: S1-B2, ...; default: any")
    parser.add_argument(
        "--norm",
        metavar="NORM",
        help="the norm of the layers without BN's statistics, e.g. GW, GW:groups=32 or GN; needed if SRC does not "
        "record it",
    )
    parser.add_argument("--keep-fc", action="store_true", help="keep the classifier, as linear.*")
    parser.add_argument(
        "--pool-norm",
        metavar="NORM",
        help="with --keep-fc: the norm between the last pooling and the classifier, e.g. 'BW:channels=32,solver=zca'; "
        "needed if SRC does not record it and it is not BN",
    )
    parser.add_argument(
        "--preprocessing",
        choices=PREPROCESSING,
        help="the images of the training; needed if SRC has Detectron2's names and does not record it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--force", action="store_true", help="overwrite DST")
    return parser


def main(args: argparse.Namespace) -> None:
    """Convert the file and print the result for each tensor."""
    conversion = convert_file(
        args.source,
        args.target,
        architecture=args.arch,
        positions=args.positions,
        norm=args.norm,
        keep_fc=args.keep_fc,
        pool_norm=args.pool_norm,
        preprocessing=args.preprocessing,
        overwrite=args.force,
    )
    if args.json:
        report = {"file": args.target, **dataclasses.asdict(conversion.provenance)}
        print(json.dumps(report | {"tensors": [row._asdict() for row in conversion.rows]}, indent=2))
        return
    rows = [
        (row.source, row.target or "(dropped)", "x".join(map(str, row.shape)) or "-", row.note)
        for row in conversion.rows
    ]
    print(tabulate(rows, headers=["source", "target", "shape", "note"]))
    facts = conversion.provenance
    before_fc = f"; before the classifier: {conversion.pool_norm}" if conversion.pool_norm else ""
    print(
        f"\n{args.target}: {len(conversion.tensors)} tensors of {facts.architecture}, {facts.norms}"
        f"{before_fc}. The .yaml beside it has the config keys that they need."
    )
