"""Flags that the export commands share."""

import argparse
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from ..cli import check_folder
from ..config import read_config
from ..errors import ConfigError
from ..export import card_facts


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and of the written folder, and KEY VALUE pairs."""
    add = parser.add_argument
    add("--config-file", required=True, metavar="FILE", help="config of the model")
    add("--weights", metavar="FILE", help="weights, default: MODEL.WEIGHTS of the config")
    add("--output", required=True, metavar="DIR", help="folder to create")
    add("--card", action="store_true", help="write README.md as a model card of the Hugging Face hub")
    add("--license", metavar="ID", help="with --card: license of the weights, e.g. apache-2.0; default: not stated")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change")


def read_model_config(args: argparse.Namespace) -> CfgNode:
    """Check ``--output``, before minutes of work, and return the config with ``--weights`` and the changed keys.

    Raises:
        FileAccessError: the folder cannot be written.
        UserError: the config cannot be read.
    """
    check_folder(args.output)
    return read_config(args.config_file, [*args.opts, *(["MODEL.WEIGHTS", args.weights] if args.weights else [])])


def requested_card(args: argparse.Namespace, cfg: CfgNode) -> dict[str, Any] | None:
    """Return the facts of the card that the flags ask for, or None.

    Raises:
        ConfigError: ``--license`` without ``--card``, or no identifier.
    """
    if args.license is not None and not args.card:
        raise ConfigError(f"--license ({args.license!r}): is written into a card alone. Fix: add --card.")
    file = Path(args.config_file).resolve()
    name = file.parent.name if file.name == "config.yaml" else file.stem  # that of a run is named as its folder
    return card_facts(cfg, name, args.license) if args.card else None
