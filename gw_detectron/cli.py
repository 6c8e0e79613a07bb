"""Shared parts of the command lines: report user errors, check arguments."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from detectron2.utils import comm
from torch.multiprocessing.spawn import ProcessExitedException

from .errors import FileAccessError, is_user_error


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """Report a user error on stderr and exit with status 1."""
    try:
        yield
    except ProcessExitedException as error:
        if error.signal_name:
            raise  # killed from outside, often for lack of memory: the traceback names the signal
        raise SystemExit(error.exit_code) from None  # the process has reported its error
    except Exception as error:
        if not is_user_error(error):
            raise
        report_error(error)
        raise SystemExit(1) from None


def report_error(error: Exception) -> None:
    """Print an error to stderr, with the number of the process unless it is the main one."""
    process = "" if comm.is_main_process() else f" in process {comm.get_rank()}"
    print(f"\nError{process}: {error}", file=sys.stderr, flush=True)


def check_folder(folder: str | Path) -> None:
    """Raise FileAccessError unless files can be written to a folder.

    The folder need not exist yet.
    """
    if not str(folder):
        raise FileAccessError("--output (''): no folder is named. Fix: give a folder.")
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
