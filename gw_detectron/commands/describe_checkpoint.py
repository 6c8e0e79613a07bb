"""Describe a checkpoint: iteration, versions, config, seed, start weights, norms and tensors."""

import argparse
import json
import os
from pathlib import Path

from ..checkpoint.describe import describe_checkpoint, format_config, format_description
from ..cli import new_parser, print_page
from ..errors import ConfigError, MissingFileError
from ..export.run_exported import OPENERS


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this tool."""
    parser = new_parser(__doc__, "output/model_final.pth", "R-50-GW.pkl --json")
    parser.add_argument("file", metavar="FILE", help="checkpoint or weight file of any format that is read")
    parser.add_argument("--config", action="store_true", help="print only the config of the run, a yaml file")
    parser.add_argument("--json", action="store_true", help="print JSON, with the config")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the description of a file."""
    if os.path.isdir(args.file):
        raise MissingFileError(f"FILE ('{args.file}'): a folder. Fix: give a checkpoint in it, e.g. model_final.pth.")
    if Path(args.file).suffix in OPENERS:
        raise ConfigError(f"FILE ('{args.file}'): an exported program. Fix: read the parity.json beside it.")
    description = describe_checkpoint(args.file)
    if args.json:
        print_page(json.dumps(description, indent=2, default=str))
    elif args.config:
        print_page(format_config(description))
    else:
        print_page(format_description(description))
