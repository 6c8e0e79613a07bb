"""Figures of the whitening papers, redrawn on random features and small networks."""

import argparse

from gw_detectron.cli import parse_seed


def add_random_arguments(parser: argparse.ArgumentParser, reduced: str) -> None:
    """Add ``--seed`` and ``--reduced``, which all experiments have."""
    parser.add_argument("--seed", type=parse_seed, default=0, help="of everything random")
    parser.add_argument("--reduced", action="store_true", help=f"seconds instead of minutes: {reduced}")
