"""Signals that end a program: SIGTERM, SIGHUP and Ctrl-C."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from multiprocessing.process import BaseProcess
from types import FrameType

#: SIGHUP, which a terminal or an SSH connection sends at its end, counts as SIGTERM
TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Interrupted(SystemExit):
    """A signal ended the program; the status is 128 + its number."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(128 + number)
        self.message = message or f"Stopped by {signal.Signals(number).name}."


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise Interrupted, as a signal handler."""
    raise Interrupted(number)


@contextlib.contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], None], *numbers: int
) -> Iterator[None]:
    """Handle signals in the body, then restore the earlier handlers.

    Only the main thread of this process handles them, and no signal that is ignored (``nohup``).
    Forked processes, such as data-loading workers, end at them as usual, but leave Ctrl-C to this
    process.
    """
    process = os.getpid()
    earlier = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            # torch's handler would raise when its workers end
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handler(number, frame)
        elif number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                earlier[number] = signal.signal(number, handle)

    try:
        yield
    finally:
        for number, previous in earlier.items():
            signal.signal(number, previous)


def end_processes(
    processes: Collection[BaseProcess], patience: float | None = None
) -> None:
    """End processes by SIGTERM, after which a training writes a checkpoint, and wait for them.

    Those that run after ``patience`` seconds are killed; None waits for any time.
    """
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(patience)
        process.kill()
        process.join()


def obey_parent(worker: int) -> None:
    """Let a data-loading worker end at a SIGTERM of its parent only.

    A scheduler sends its signal to all processes, and the trainer still needs the worker to finish
    the step. Ignoring SIGTERM is not enough: at its end the parent's ``multiprocessing`` sends it,
    and waits for the worker.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATING)
    threading.Thread(target=_exit_at_signal_of_parent, daemon=True).start()


def _exit_at_signal_of_parent() -> None:
    while signal.sigwaitinfo(TERMINATING).si_pid != os.getppid():
        pass
    os._exit(0)  # torch takes another status for a worker that has died
