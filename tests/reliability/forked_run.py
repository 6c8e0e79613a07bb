"""Run a function in a forked child process that reports its phases and can be killed at any moment.

A fresh interpreter needs seconds to import torch and Detectron2; a fork of a process that has imported them does not.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from detectron2.utils.logger import setup_logger

from gw_detectron import atomic
from gw_detectron.cli import errors_reported
from gw_detectron.engine import Trainer

LIMIT = 120.0  # seconds after which a child that hangs is killed
STEP, CHECKPOINT, EVALUATION, OTHER = "step", "checkpoint write", "evaluation", "other"


class Change(NamedTuple):
    """The begin of a phase: seconds of the clock, seconds of CPU time of the child, the phase."""

    at: float
    cpu: float
    phase: str


class Child:
    """A forked process in its own session.

    Args:
        work: what the child does; it gets a function that reports the name of a phase to the parent.
        log: file of its stdout and stderr.
    """

    def __init__(self, work: Callable[[Callable[[str], None]], Any], log: Path) -> None:
        self.log = log
        self.phase = ""
        self.changes: list[Change] = []
        self.status: int | None = None
        self._deadline = time.monotonic() + LIMIT
        self._pipe, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run(work, writing, self._pipe, log)
        os.close(writing)

    def read(self, seconds: float) -> bool:
        """Read the next phase if it comes within some seconds; return False after the child's end."""
        if not select.select([self._pipe], [], [], max(seconds, 0))[0]:
            if time.monotonic() > self._deadline:
                self.kill()
                raise TimeoutError(f"a child has hung for {LIMIT:g} s in phase {self.phase!r}; see {self.log}")
            return True
        received = b""
        while not received.endswith(b"\n"):
            byte = os.read(self._pipe, 1)
            if not byte:
                return False
            received += byte
        at, cpu, self.phase = received.decode().strip().split(" ", 2)
        self.changes.append(Change(float(at), float(cpu), self.phase))
        self._deadline = time.monotonic() + LIMIT
        return True

    def wait_for(self, phase: str, times: int = 1) -> bool:
        """Wait until the child enters a phase for the n-th time; False if it ends before."""
        seen = len(self.changes)
        while self.read(1.0):
            times -= sum(change.phase == phase for change in self.changes[seen:])
            seen = len(self.changes)
            if times <= 0:
                return True
        return False

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def send_to_all(self, number: int) -> None:
        """Signal the child and its processes, as a terminal does."""
        os.killpg(self.pid, number)

    def processes(self) -> list[int]:
        """List the processes of the session that are running, but not the child itself."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid and state != "Z" and int(path.parent.name) != self.pid:
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """Kill the whole session, and wait for its end."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # before its setsid the group does not exist
            self.wait()

    def wait(self) -> int:
        """Wait for the end and return the status; minus the number of a signal that killed it."""
        while self.status is None and self.read(1.0):
            pass
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pipe)
        return self.status

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def child(work: Callable[[Callable[[str], None]], Any], log: Path) -> Iterator[Child]:
    """Start a child and kill it at the end of the ``with`` statement."""
    process = Child(work, log)
    try:
        yield process
    finally:
        process.kill()


def _run(work: Callable[[Callable[[str], None]], Any], writing: int, reading: int, log: Path) -> None:
    """Do the work in the child; never return."""
    status = 1
    try:
        os.setsid()
        os.close(reading)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(file, standard)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for name in ("detectron2", "fvcore", "gw_detectron"):  # the loggers of earlier runs of the parent
            logging.getLogger(name).handlers.clear()
        setup_logger.cache_clear()
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        for number in (signal.SIGINT, signal.SIGTERM):  # as in a fresh interpreter, whatever pytest has set
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

        def report(phase: str) -> None:
            os.write(writing, f"{time.monotonic():.6f} {time.process_time():.6f} {phase}\n".encode())

        with errors_reported():
            work(report)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def report_phases(report: Callable[[str], None]) -> None:
    """Let trainings of this process report their steps, checkpoint writes and evaluations."""
    step, test, write = Trainer.run_step, Trainer.test.__func__, atomic._open_atomic

    def run_step(self: Trainer) -> None:
        report(STEP)
        step(self)
        report(OTHER)

    def run_test(cls: type[Trainer], *args: Any, **kwargs: Any) -> Any:
        report(EVALUATION)
        result = test(cls, *args, **kwargs)
        report(OTHER)
        return result

    @contextlib.contextmanager
    def open_atomic(path: str, mode: str) -> Iterator[Any]:
        report(CHECKPOINT)
        with write(path, mode) as file:
            yield file
        report(OTHER)

    Trainer.run_step = run_step
    Trainer.test = classmethod(run_test)
    atomic._open_atomic = open_atomic
