"""List, search and print the configs of this package.

`list` prints the configs whose name and description contain all words, in any case. `show` prints a config with all
its keys: the names are those of `list`, or files. --config-file of every command takes both, too, if they are yaml;
LazyConfigs (.py) are for Detectron2's tools/lazyconfig_train_net.py.
"""

import argparse
import json
import os

from detectron2.config import LazyConfig

from ..cli import new_parser, print_page
from ..config import read_config
from ..errors import ConfigError, first_line
from ..model_zoo import get_config_file, list_configs
from ..shipped_configs import config_summary, find_config_file, shipped_configs


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__, "list mask_rcnn R_50 GW", "show COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml SOLVER.BASE_LR 0.01"
    )
    actions = parser.add_subparsers(dest="action", metavar="list|show")
    search = actions.add_parser("list", help="list the configs that contain all words (default)")
    search.add_argument("words", nargs="*", metavar="WORD", help="a part of name or description; default: all configs")
    search.add_argument("--json", action="store_true", help="print description and file by name as JSON")
    show = actions.add_parser("show", help="print a config with all keys")
    show.add_argument("name", metavar="NAME", help="a name of `list`, or a file")
    show.add_argument("--json", action="store_true", help="print JSON instead of yaml")
    show.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change")
    parser.set_defaults(action="list", words=[], json=False)
    return parser


def main(args: argparse.Namespace) -> None:
    """List or print configs."""
    if args.action == "show":
        opts = [word for word in args.opts if word != "--json"]  # the remainder takes flags, too
        print_page(_resolved(args.name, opts, args.json or len(opts) < len(args.opts)))
        return
    files = shipped_configs()
    configs = {name: {"description": config_summary(files[name]), "file": str(files[name])} for name in list_configs()}
    for word in args.words:
        configs = {name: row for name, row in configs.items() if word.lower() in f"{name} {row['description']}".lower()}
    if not configs:
        raise ConfigError(f"words ({' '.join(args.words)}): no config has them all. Fix: give fewer words.")
    if args.json:
        print_page(json.dumps(configs, indent=2))
    else:
        print_page("\n".join(f"{name}\n    {row['description']}" for name, row in configs.items()))


def _resolved(name: str, opts: list[str], as_json: bool) -> str:
    file = find_config_file(name)
    if not os.path.exists(file):
        get_config_file(name)  # raises an error that names the nearest
    if file.endswith(".py"):
        if as_json:
            raise ConfigError(f"--json: '{name}' is a LazyConfig, which is Python. Fix: leave --json out.")
        try:
            return LazyConfig.to_py(LazyConfig.apply_overrides(LazyConfig.load(file), opts))
        except Exception as error:  # any of Hydra's, OmegaConf's or the file's own
            raise ConfigError(f"'{name}' {' '.join(opts)}: {first_line(error)}. Fix: see the file '{file}'.") from error
    cfg = read_config(file, opts)
    return json.dumps(cfg, indent=2) if as_json else cfg.dump().rstrip()
