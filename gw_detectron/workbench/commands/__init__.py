"""The ``gw-detectron`` command. ``tools/train_net.py`` runs its ``train``.

Each module of this folder is a command: ``get_parser()`` returns its flags, and ``main(args)``
calls the package and prints. The exit status is 0, 1 after an error or if ``main`` returns False,
and 2 after unusable flags.
"""

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ...installation import __version__, require_detectron2
from ..console import errors_reported


class Command(NamedTuple):
    """A command: its module, its line in the help, and options of ``get_parser``."""

    module: str
    summary: str
    options: Mapping[str, Any] = MappingProxyType({})
    needs_detectron2: bool = True


COMMANDS = {
    "train": Command("train", "train a detector from a config"),
    "eval": Command("train", "evaluate a trained detector", {"evaluation": True}),
    "predict": Command("predict", "find objects on images, folders and videos"),
    "compare": Command(
        "compare", "train with several norms, and say which one to take"
    ),
    "report": Command("report", "write a page about a run: scores, curves, errors"),
    "export": Command("export", "write a detector or a backbone as pt2 or ONNX"),
    "weights": Command("weights", "convert and describe weight files"),
    "list": Command(
        "list", "list the configs, the norm names, or the norms of a model"
    ),
    "doctor": Command(
        "doctor", "check this installation and say what works", needs_detectron2=False
    ),
}


_HEAD = """\
usage: gw-detectron COMMAND [--help] ...

Group Whitening for Detectron2. Each command explains its flags with --help.
"""


def main() -> None:
    """Run ``gw-detectron COMMAND ...``."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        # argparse and messages name the command
        sys.argv = [
            f"gw-detectron {name}",
            *words,
        ]
        run(name)
        return

    with errors_reported():
        if name in ("-h", "--help"):
            print(_overview())
        elif name == "--version":
            print(f"gw-detectron {__version__}")
        else:
            error = f"Error: command ({name!r}): unknown. Fix: give one of these."
            print(f"{_overview()}\n\n{error}", file=sys.stderr)
            raise SystemExit(2)


def run(name: str) -> None:
    """Run a command with the flags of the command line."""
    command = COMMANDS[name]
    with errors_reported():
        if command.needs_detectron2:
            require_detectron2(f"gw-detectron {name}")
        module = importlib.import_module(f".{command.module}", __package__)
        args = module.get_parser(**command.options).parse_args()
        if module.main(args) is False:
            raise SystemExit(1)


def _overview() -> str:
    lines = [f"  {name:7}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([_HEAD, *lines, "", "gw-detectron --version prints the version."])
