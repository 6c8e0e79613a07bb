"""Report errors and signals of command lines; check their arguments."""

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

from ..errors import FileAccessError, first_line, is_out_of_memory, is_user_error, message_of


class Interrupted(SystemExit):
    """SIGTERM or Ctrl-C ended the program; the status is 128 + its number."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(128 + number)
        self.message = message or f"Stopped by {signal.Signals(number).name}."


class MixedParser(argparse.ArgumentParser):
    """Parser that takes flags between words."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


class RunParser(argparse.ArgumentParser):
    """Parser whose first word may be a RUN, a run folder or a checkpoint.

    ``run`` of its result is this word or None. A first word such as MODEL.WEIGHTS is a config key.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(usage="%(prog)s [RUN] [--help] [FLAGS] [KEY VALUE ...]", **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        is_run = bool(words) and (
            os.path.exists(words[0]) or not re.match(r"-|[A-Z0-9_]+(\.|$)", words[0])
        )
        run = words.pop(0) if is_run else None
        found, unknown = super().parse_known_args(words, namespace)
        if not run and (later := getattr(found, "opts", None)) and os.path.exists(later[0]):
            self.error(
                f"RUN ('{later[0]}'): given after flags. Fix: put it first: {self.prog} {later[0]} ..."
            )
        found.run = run
        return found, unknown


def new_parser(
    description: str | None,
    *examples: str,
    note: str = "",
    kind: type = argparse.ArgumentParser,
    **options: Any,
) -> Any:
    """Create the parser of a command; its help ends with a note and examples, the words after the command's name."""
    lines = "\n".join(f"  %(prog)s {example}".rstrip() for example in examples)
    return kind(
        description=description,
        epilog=f"{note}\n\nexamples:\n{lines}" if note else f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """Report user errors, signals and a lack of memory without a traceback; exit with 1, 143 or 130 (Ctrl-C)."""
    try:
        with signals_handled(_interrupt, signal.SIGTERM), safe_imports():
            yield
    except ProcessExitedException as error:
        if error.signal_name:
            raise  # killed from outside, often for lack of memory: the traceback names the signal
        raise SystemExit(error.exit_code) from None  # the process has reported its error
    except (Interrupted, KeyboardInterrupt) as error:
        ended = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
        if _rank() == 0:
            print(f"\n{ended.message}", file=sys.stderr, flush=True)
        raise SystemExit(ended.code) from None  # without the message, which is printed once
    except Exception as error:
        if is_user_error(error):
            report_error(error)
        elif is_out_of_memory(error):
            report_error(
                f"out of memory: {first_line(error)}. Fix: use a smaller model, batch or image."
            )
        elif re.match(
            r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", str(error)
        ):
            report_error(
                f"data loading: {first_line(error)}. Fix: see the reason above; if there is none, memory or "
                "/dev/shm was full: lower DATALOADER.NUM_WORKERS."
            )
        else:
            raise
        raise SystemExit(1) from None


@contextlib.contextmanager
def safe_imports() -> Iterator[None]:
    """Keep the current folder out of ``sys.path`` of Python processes that the body starts.

    ``multiprocessing`` starts its servers by ``python -c``, which would import a ``numbers.py`` of a downloaded dataset
    in place of Python's own.
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


@contextlib.contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], None], *numbers: int
) -> Iterator[None]:
    """Handle signals in the body, then restore the earlier handlers.

    Only the main thread of this process handles them, and no signal that is ignored (``nohup``). Forked processes, such
    as data-loading workers, end at SIGTERM as usual and leave Ctrl-C to this process.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            if hasattr(
                signal, "SIGCHLD"
            ):  # not on Windows; torch's handler would raise when its workers end
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handler(number, frame)
        elif number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    earlier = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                earlier[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, previous in earlier.items():
            signal.signal(number, previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def report_error(error: Exception | str) -> None:
    """Print an error to stderr, with the process number unless it is 0."""
    process = f" in process {_rank()}" if _rank() else ""
    print(
        f"\nError{process}: {error if isinstance(error, str) else message_of(error)}",
        file=sys.stderr,
        flush=True,
    )


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")  # of torchrun
    return int(rank) if rank.isdecimal() else 0


def check_folder(folder: str | Path) -> None:
    """Raise FileAccessError unless files can be written to a folder, which need not exist yet."""
    path = Path(folder).absolute()
    existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not str(folder) or not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise FileAccessError(
            f"--output ('{folder}'): not a folder that can be written. Fix: give another folder."
        )


def print_page(text: str) -> None:
    """Print a long text; end quietly if its reader has closed the pipe, as ``head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python flushes it again at its end
