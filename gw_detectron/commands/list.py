"""List the configs, or the norm names.

`configs` prints the configs whose name and description contain all words, in any case. `norms` prints the norm names,
describes norms (NAME or NAME:key=value,key=value), or lists the norm layers of a config's model.
"""

import argparse

import torch
from tabulate import tabulate
from torch import nn

from ..cli import new_parser, print_page
from ..config import config_summary, read_config, shipped_configs
from ..errors import ConfigError
from ..model_zoo import list_configs
from ..modeling import build_checked_model
from ..norms import build_norm, norm_options, norm_spec, norm_table
from ..ops.solvers import SOLVERS


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__,
        "configs mask_rcnn R_50 GW",
        "norms GW:groups=32 BW:solver=zca",
        "norms --config-file COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="configs|norms", required=True)
    configs = kinds.add_parser("configs", help="list the configs that contain all words")
    configs.add_argument("words", nargs="*", metavar="WORD", help="a part of name or description; default: all configs")
    norms = kinds.add_parser("norms", help="list norm names, describe norms, or list the norms of a model")
    norms.add_argument("specs", nargs="*", metavar="NORM", help="norms to describe; default: list all names")
    norms.add_argument("--config-file", metavar="FILE", help="list the norm layers of this config's model instead")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the list."""
    if args.kind == "configs":
        print_page(_configs(args.words))
    elif args.config_file:
        if args.specs:
            raise ConfigError(f"NORM ({args.specs[0]!r}): has no effect with --config-file. Fix: give one of the two.")
        print_page(norm_table(build_checked_model(read_config(args.config_file), "meta")))
    elif args.specs:
        print(tabulate([_describe(spec) for spec in args.specs], headers="keys"))
    else:
        rows = [(name, ", ".join(keys)) for name, keys in norm_options().items()]
        print(tabulate(rows, headers=["norm", "options"]))
        print(f"\nSolvers of GW and BW: {', '.join(SOLVERS)}")
        print("`gw-detectron list norms GW` shows the defaults of a norm; docs/norms.md says which to take.")


def _configs(words: list[str]) -> str:
    files = shipped_configs()
    rows = [f"{name}\n    {config_summary(files[name])}" for name in list_configs()]
    found = [row for row in rows if all(word.lower() in row.lower() for word in words)]
    if not found:
        raise ConfigError(f"WORD ({' '.join(words)}): no config has them all. Fix: give fewer words.")
    return "\n".join(found)


def _describe(spec: str) -> dict[str, object]:
    """Describe a norm of 256 channels."""
    with torch.device("meta"):
        layer = build_norm(spec, 256, where="NORM") or nn.Identity()
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    return {"norm": spec, "in full": norm_spec(layer), "layer": type(layer).__name__, "parameters": parameters}
