"""Figures of the whitening papers, redrawn on small networks, and experiments with detectors."""

import argparse


def parse_seed(text: str) -> int:
    """Parse a seed that torch and NumPy accept."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a seed. Fix: give a whole number from 0 to {2**32 - 1}."
        )
    return int(text)


def add_random_arguments(parser: argparse.ArgumentParser, reduced: str) -> None:
    """Add ``--seed`` and ``--reduced``."""
    parser.add_argument(
        "--seed", type=parse_seed, default=0, help="of everything random"
    )
    add_reduced(parser, reduced)


def add_reduced(parser: argparse.ArgumentParser, reduced: str) -> None:
    """Add ``--reduced``, which all experiments have."""
    parser.add_argument(
        "--reduced", action="store_true", help=f"seconds instead of minutes: {reduced}"
    )
