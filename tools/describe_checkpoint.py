#!/usr/bin/env python
"""Describe a checkpoint: iteration, versions, config, seed, start weights, norms and tensors."""

import gw_detectron.needs_detectron2  # noqa: F401

# isort: split

import argparse
import json

from gw_detectron.checkpoint.describe import describe_checkpoint, format_description
from gw_detectron.cli import errors_reported, parse_file_arguments


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", metavar="FILE", help="checkpoint or weight file of any format that is read")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the description of a file."""
    description = describe_checkpoint(args.file)
    print(json.dumps(description, indent=2, default=str) if args.json else format_description(description))


if __name__ == "__main__":
    with errors_reported():
        main(parse_file_arguments(get_parser()))
