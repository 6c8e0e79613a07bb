"""Train or evaluate a detector from a yaml, with Detectron2's flags or under torchrun."""

import argparse

from .. import run as engine
from ..run import get_parser
from ..run.processes import launch_from_args

__all__ = ["get_parser", "main"]


def main(args: argparse.Namespace) -> None:
    """Run the training or evaluation in the processes that the flags ask for."""
    launch_from_args(engine.main, args)
