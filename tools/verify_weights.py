#!/usr/bin/env python
"""Proves weights right: the same images through torchvision's ResNet and Detectron2's, and each mistake's signature."""

import argparse
import sys

from gw_detectron.checkpoint.accuracy import is_labelled, measure_accuracy
from gw_detectron.checkpoint.catalog import local_path
from gw_detectron.checkpoint.images import load_images, synthetic_images
from gw_detectron.checkpoint.verify import verify
from gw_detectron.config import read_config
from gw_detectron.engine.launch import errors_reported


def get_parser() -> argparse.ArgumentParser:
    """Returns the parser of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="The exit status is 1 if the networks differ.")
    parser.add_argument("weights", metavar="WEIGHTS", help="converted weights, an original file, or a gw:// address")
    parser.add_argument("--images", metavar="DIR", help="with a folder for each class, accuracy is measured as well")
    parser.add_argument("--config-file", metavar="YAML", help="test this config instead of the one that fits")
    parser.add_argument("--source", metavar="FILE", help="the file WEIGHTS was converted from, to prove the conversion")
    return parser


def main(args: argparse.Namespace) -> bool:
    """Prints the comparison, and says whether the networks agree."""
    weights = local_path(args.weights)
    cfg = read_config(args.config_file) if args.config_file else None
    images = load_images(args.images) if args.images else synthetic_images()
    result = verify(weights, images, cfg=cfg, source=args.source)
    print(result)
    if args.images and is_labelled(args.images):
        print("", *measure_accuracy(weights, args.images, cfg=cfg), sep="\n")
    return result.agrees


if __name__ == "__main__":
    with errors_reported():
        sys.exit(0 if main(get_parser().parse_args()) else 1)
