"""Train or evaluate a detector from a yaml, with Detectron2's flags and optionally under torchrun."""

import argparse

from .. import engine
from ..engine.launch import launch_from_args


def get_parser(*, evaluation: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the trainer; ``evaluation`` sets ``--eval-only`` and shows examples of it."""
    parser = engine.get_parser(evaluation=evaluation)
    parser.set_defaults(eval_only=evaluation)
    return parser


def main(args: argparse.Namespace) -> None:
    """Run the training or evaluation in the processes that the flags ask for."""
    launch_from_args(engine.main, args)
