"""List the norm names, describe norms, or list the norms of a model.

A norm is NAME or NAME:key=value,key=value, in configs, in Python and on command lines.
"""

import argparse
import json

import torch
from tabulate import tabulate
from torch import nn

from ..cli import new_parser, print_page
from ..config import read_config
from ..errors import ConfigError
from ..modeling import build_checked_model
from ..norms import norm_options, norm_rows, norm_table
from ..norms.installed import get_norm
from ..norms.names import find_norm_spec, resolve_norm
from ..ops.solvers import SOLVERS


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__, "GW:groups=32 BW:solver=zca", "--config-file COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml"
    )
    parser.add_argument("specs", nargs="*", metavar="NORM", help="norms to describe; default: list all names")
    parser.add_argument(
        "--channels", type=int, default=256, metavar="C", help="channels of the described norms, default: %(default)s"
    )
    parser.add_argument("--config-file", metavar="FILE", help="list the norm layers of this config's model instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print norm names, norms, or the norm layers of a model."""
    if args.config_file:
        if args.specs:
            raise ConfigError(f"NORM ({args.specs[0]!r}): has no effect with --config-file. Fix: give one of the two.")
        model = build_checked_model(read_config(args.config_file), "meta")
        table = json.dumps([row._asdict() for row in norm_rows(model)], indent=2) if args.json else norm_table(model)
        print_page(table)
        return
    if args.channels < 1:
        raise ConfigError(f"--channels ({args.channels}): too few. Fix: give 1 or more.")
    if args.specs:
        found = [_describe(spec, args.channels) for spec in args.specs]
        print(json.dumps(found, indent=2) if args.json else tabulate(found, headers="keys"))
        return
    options = norm_options()
    if args.json:
        print(json.dumps({"norms": options, "solvers": [*SOLVERS]}, indent=2))
        return
    print(tabulate([(name, ", ".join(keys)) for name, keys in options.items()], headers=["norm", "options"]))
    print(f"\nSolvers of GW and BW: {', '.join(SOLVERS)}")
    print("`gw-detectron norms GW` shows the defaults of a norm; docs/norms.md says which to take.")


def _describe(spec: str, channels: int) -> dict[str, object]:
    norm = resolve_norm(spec, where="NORM", channels=[channels])
    with torch.device("meta"):
        layer = get_norm(norm, channels) or nn.Identity()
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    return {"norm": spec, "in full": find_norm_spec(layer), "layer": type(layer).__name__, "parameters": parameters}
