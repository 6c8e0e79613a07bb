"""The console of all commands: errors and exit codes, output, progress bars."""

import contextlib
import errno
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

from ..errors import (
    FileAccessError,
    first_line,
    is_out_of_memory,
    is_user_error,
    message_of,
    printable,
)
from .signals import TERMINATING, Interrupted, interrupt, signals_handled

_LOST_WORKER = re.compile(
    r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)"
)

_READER_ENDED = (errno.EPIPE, errno.EIO)  # of a pipe, and of a terminal
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """Report user errors, signals and a lack of memory without a traceback.

    The exit status is 1, or 128 + the number of the signal: 143 (SIGTERM), 129 (SIGHUP), 130
    (Ctrl-C).
    """
    with _output_may_end(), _failures_reported():
        yield


@contextlib.contextmanager
def _failures_reported() -> Iterator[None]:
    try:
        with (
            signals_handled(interrupt, *TERMINATING, signal.SIGINT),
            safe_imports(),
        ):
            yield

    except ProcessExitedException as error:
        if error.signal_name:
            raise  # killed from outside, often for lack of memory: the traceback names the signal
        # the process has reported its error
        raise SystemExit(error.exit_code) from None

    except Interrupted as error:
        if _rank() == 0:
            print(f"\n{error.message}", file=sys.stderr, flush=True)
        # without the message, which is printed once
        raise SystemExit(error.code) from None

    except Exception as error:
        message = _describe(error)
        if message is None:
            raise
        report_error(message)
        raise SystemExit(1) from None


def _describe(error: Exception) -> str | None:
    """Describe an error that needs no traceback; None for others."""
    if _is_of_semaphore(error):
        return (
            f"/dev/shm: {error}. Fix: make it writable (in containers --shm-size 8g), or set "
            "DATALOADER.NUM_WORKERS 0."
        )
    if is_user_error(error):
        return message_of(error)
    if is_out_of_memory(error):
        return f"out of memory: {first_line(error)}. Fix: use a smaller model, batch or image."
    if _LOST_WORKER.match(str(error)):
        return (
            f"data loading: {first_line(error)}. Fix: see the reason above; if there is none, "
            "memory or /dev/shm was full: lower DATALOADER.NUM_WORKERS."
        )
    return None


def _is_of_semaphore(error: Exception) -> bool:
    """Return whether a semaphore of worker processes was not created: the error names no file."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any(
        frame.filename.endswith("multiprocessing/synchronize.py") for frame in frames
    )


def report_error(message: str) -> None:
    """Print an error to stderr, with the process number unless it is 0."""
    rank = _rank()
    process = f" in process {rank}" if rank else ""
    lines = "\n".join(map(printable, message.split("\n")))  # with names out of files
    print(f"\nError{process}: {lines}", file=sys.stderr, flush=True)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")  # of torchrun
    return int(rank) if rank.isdecimal() else 0


@contextlib.contextmanager
def safe_imports() -> Iterator[None]:
    """Keep the current folder out of ``sys.path`` of Python processes that the body starts.

    ``multiprocessing`` starts its servers by ``python -c``, which would import a ``numbers.py`` of
    a downloaded dataset in place of Python's own.
    """
    earlier = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if earlier is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = earlier


class _Output:
    """A stream that goes to the null device once its reader has ended, as ``head`` does, or its disk is full.

    The reader may be a terminal, too. Without a stream (``>&-``), all goes to the null device.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115, open as long as stdout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._null_device_after_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._null_device_after_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _null_device_after_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (*_READER_ENDED, *_DISK_FULL):
                raise
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, self._stream.fileno())
            os.close(null_device)
            if error.errno in _DISK_FULL:
                print(
                    f"{self._stream.name}: {error.strerror}. The command goes on without this output. Fix: free disk "
                    "space.",
                    file=sys.stderr,
                    flush=True,
                )


@contextlib.contextmanager
def _output_may_end() -> Iterator[None]:
    """Go on in the body without output, in libraries as well, if a reader of it ends or its disk is full."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal of ASCII shows other characters as escapes, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    output, errors = _Output(sys.stdout), _Output(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            yield
        finally:
            output.flush()


def check_folder(folder: str | Path) -> None:
    """Raise FileAccessError unless files can be written to a folder, which need not exist yet."""
    path = Path(folder).absolute()
    existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if (
        not str(folder)
        or not existing.is_dir()
        or not os.access(existing, os.W_OK | os.X_OK)
    ):
        raise FileAccessError(
            f"--output ('{folder}'): not a folder that can be written. Fix: give another folder."
        )


class _Lines(io.TextIOBase):
    """Writes a progress bar as lines: in a file, the bar cannot be drawn anew in its place."""

    def write(self, text: str) -> int:
        line = text.strip()
        if line:
            print(line, file=sys.stderr, flush=True)
        return len(text)


def progress_bar(
    items: Iterable[Any] | None = None, *, desc: str, unit: str, **options: Any
) -> Any:
    """Create a tqdm bar; where there is no terminal, a line each minute, after the first one.

    Args:
        items: what is iterated; without them the bar is updated by hand.
    """
    from tqdm import tqdm  # comes with Detectron2, which some commands do not need

    drawn: dict[str, Any] = {"mininterval": 0.5}
    if not sys.stderr.isatty():
        drawn = {"mininterval": 60, "maxinterval": 60, "delay": 60, "ncols": 100}
        drawn["file"] = _Lines()
    return tqdm(items, desc=desc, unit=unit, **{**drawn, **options})
