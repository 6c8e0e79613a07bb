"""Describe a checkpoint: iteration, versions, config, seed, start weights, norms and tensors."""

import argparse
import json
import os

from ..checkpoint.describe import describe_checkpoint, format_description
from ..cli import new_parser, print_page
from ..errors import MissingFileError


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool."""
    parser = new_parser(__doc__, "output/model_final.pth", "R-50-GW.pkl --json")
    parser.add_argument("file", metavar="FILE", help="checkpoint or weight file of any format that is read")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the description of a file."""
    if os.path.isdir(args.file):
        raise MissingFileError(f"FILE ('{args.file}'): a folder. Fix: give a checkpoint in it, e.g. model_final.pth.")
    description = describe_checkpoint(args.file)
    print_page(json.dumps(description, indent=2, default=str) if args.json else format_description(description))
