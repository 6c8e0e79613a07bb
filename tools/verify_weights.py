#!/usr/bin/env python
"""Verify weights: compare the features of torchvision's ResNet and Detectron2's, and name a wrong setting."""

import gw_detectron.needs_detectron2  # noqa: F401

# isort: split

import argparse
import sys

from gw_detectron.checkpoint.verify import is_labeled, measure_accuracy, verify
from gw_detectron.cli import errors_reported, parse_file_arguments
from gw_detectron.config import read_config
from gw_detectron.data.images import load_images, synthetic_images


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="The exit status is 1 if the networks differ.")
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
    return parser


def main(args: argparse.Namespace) -> bool:
    """Print the comparison and return whether the networks agree."""
    cfg = read_config(args.config_file) if args.config_file else None
    images = load_images(args.images) if args.images else synthetic_images()
    result = verify(args.weights, images, cfg=cfg, source=args.source, norm=args.norm)
    print(result)
    if args.images and is_labeled(args.images):
        print("", *measure_accuracy(args.weights, args.images, cfg=cfg, norm=args.norm), sep="\n")
    return result.agrees


if __name__ == "__main__":
    with errors_reported():
        sys.exit(0 if main(parse_file_arguments(get_parser())) else 1)
