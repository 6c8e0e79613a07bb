"""Verify weights: compare the features of torchvision's ResNet and Detectron2's, and name a wrong setting."""

import argparse
import dataclasses
import json

from ..cli import new_parser
from ..config import read_config
from ..data import synthetic_images
from ..data.images import load_images
from ..errors import WeightsError
from ..weights.verify import is_labeled, measure_accuracy, verify


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool."""
    parser = new_parser(
        __doc__,
        "R-50-GW.pkl --source resnet50_gw.pth --norm GW",
        "gw://imagenet/R-50 --images imagenet/val",
        note="The exit status is 1 if the networks differ.",
    )
    parser.add_argument("weights", metavar="WEIGHTS", help="converted weights, an original file, or a gw:// address")
    parser.add_argument(
        "--images", metavar="DIR", help="images to compare on; with a subfolder for each class, also measure accuracy"
    )
    parser.add_argument("--config-file", metavar="YAML", help="config to verify; default: the one that fits WEIGHTS")
    parser.add_argument(
        "--source", metavar="FILE", help="the file WEIGHTS was converted from, to verify the conversion"
    )
    parser.add_argument(
        "--norm",
        metavar="NORM",
        help="the norm of the source's layers without BN's statistics, e.g. GW or GN; needed if the source does not "
        "record it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(args: argparse.Namespace) -> bool:
    """Print the comparison and return whether the networks agree."""
    cfg = read_config(args.config_file) if args.config_file else None
    images = load_images(args.images) if args.images else synthetic_images()
    result = verify(args.weights, images, cfg=cfg, source=args.source, norm=args.norm)
    accuracy, not_measured = [], ""
    if args.images and is_labeled(args.images):
        try:
            accuracy = measure_accuracy(args.weights, args.images, cfg=cfg, norm=args.norm)
        except WeightsError as error:  # without a classifier the comparison stands alone
            not_measured = f"accuracy: not measured: {error}"
    if args.json:
        rows = {"accuracy": [row._asdict() for row in accuracy], "not_measured": not_measured}
        print(json.dumps(dataclasses.asdict(result) | rows, indent=2))
    else:
        print(result, *(["", *accuracy] if accuracy else []), *(["", not_measured] if not_measured else []), sep="\n")
    return result.agrees
