"""Check command-line arguments of an analysis."""

import argparse
import os
from pathlib import Path

from ..errors import FileAccessError


def check_folder(folder: str | Path) -> None:
    """Raise FileAccessError unless files can be written to a folder.

    The folder need not exist yet.
    """
    path = Path(folder).absolute()
    existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not existing.is_dir():
        reason = "is not a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        reason = "is write-protected"
    else:
        return
    raise FileAccessError(f"--output ('{folder}'): '{existing}' {reason}. Fix: give another folder.")


def parse_seed(text: str) -> int:
    """Parse a seed that torch and NumPy accept; for argparse."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed. Fix: give a whole number from 0 to {2**32 - 1}.")
    return int(text)
