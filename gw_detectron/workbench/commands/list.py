"""List the configs, or the norm names.

`configs` prints the configs whose name and description contain all words, in any case. `norms`
prints the norm names, or the norm layers of a config's model.
"""

import argparse

from tabulate import tabulate

from ...config import config_summary, list_configs, read_config, shipped_configs
from ...errors import ConfigError
from ...modeling import build_checked_model
from ...norms import full_name, norm_options, norm_table
from ...ops.solvers import SOLVERS
from .parsers import new_parser

# a layer of fewer channels than groups would have fewer groups
_CHANNELS = 256


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__,
        "configs mask_rcnn R_50 GW",
        "norms --config-file COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="configs|norms", required=True)

    configs = kinds.add_parser(
        "configs", help="list the configs that contain all words"
    )
    configs.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a part of name or description; default: all configs",
    )

    norms = kinds.add_parser("norms", help="list norm names, or the norms of a model")
    norms.add_argument(
        "--config-file",
        metavar="FILE",
        help="list the norm layers of this config's model instead",
    )

    return parser


def main(args: argparse.Namespace) -> None:
    """Print the list."""
    if args.kind == "configs":
        print(_configs(args.words))
    elif args.config_file:
        print(norm_table(build_checked_model(read_config(args.config_file), "meta")))
    else:
        print(_norms())


def _norms() -> str:
    """List the norm names with their options, and the defaults for a layer of many channels."""
    rows = []
    for name, options in norm_options().items():
        _, _, defaults = full_name(name, _CHANNELS).partition(":")
        rows.append((name, defaults, ", ".join(options)))
    table = tabulate(rows, headers=["norm", "defaults", "options"])
    return f"{table}\n\nSolvers of GW and BW: {', '.join(SOLVERS)}. See docs/norms.md."


def _configs(words: list[str]) -> str:
    """Describe the configs that contain all words."""
    files = shipped_configs()
    rows = [f"{name}\n    {config_summary(files[name])}" for name in list_configs()]
    for word in words:
        rows = [row for row in rows if word.lower() in row.lower()]
    if not rows:
        raise ConfigError(
            f"WORD ({' '.join(words)}): no config has them all. Fix: give fewer words."
        )
    return "\n".join(rows)
