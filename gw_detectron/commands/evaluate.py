"""Evaluate a trained detector."""

import argparse

from ..engine import get_parser as get_training_parser
from .train_net import main

__all__ = ["get_parser", "main"]


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of the trainer; its ``--eval-only`` is set by the command."""
    return get_training_parser(evaluation=True)
