"""Run a function in a forked child process that reports its phases.

A fresh interpreter needs seconds to import torch and Detectron2; a fork of a process that has imported them does not.
"""

import argparse
import contextlib
import multiprocessing.process
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gw_detectron.atomic import AtomicPathManager
from gw_detectron.workbench.commands.train import run_here as run_main
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.processes import launch_from_args
from gw_detectron.workbench.signals import TERMINATING

from ...loggers import reset_loggers

LIMIT = 120.0  # seconds after which a child that hangs is killed

# The first backward pass of a process decides whether its forks can train: after an import of torch.compile's Dynamo it
# starts threads for devices, which no fork has. This one comes before all tests, which may compile.
torch.ones(1, requires_grad=True).backward()
STEP, CHECKPOINT, EVALUATION, OTHER = "step", "checkpoint write", "evaluation", "other"
# the argument reports a phase to the parent
Work = Callable[[Callable[[str], None]], Any]


class Child:
    """A forked process in its own session; its output goes to a file."""

    def __init__(self, work: Work, log: Path) -> None:
        self.log = log
        self.phases: list[str] = []
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
        """Wait some seconds for the next phase; False after the child's end."""
        ready, _, _ = select.select([self._pipe], [], [], seconds)
        if not ready:
            if time.monotonic() > self._deadline:
                self.kill()
                raise TimeoutError(
                    f"a child has hung for {LIMIT:g} s after {self.phases[-1:]}; see {self.log}"
                )
            return True

        received = b""
        while not received.endswith(b"\n"):
            byte = os.read(self._pipe, 1)
            if not byte:
                return False
            received += byte

        self.phases.append(received.decode().strip())
        self._deadline = time.monotonic() + LIMIT
        return True

    def count(self, phase: str) -> int:
        """Count how often the child has entered a phase."""
        return self.phases.count(phase)

    def wait_for(self, phase: str, times: int = 1) -> bool:
        """Wait for the n-th begin of a phase; False if the child ends."""
        wanted = self.count(phase) + times
        while self.count(phase) < wanted:
            if not self.read(1.0):
                return False
        return True

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def send_to_all(self, number: int) -> None:
        """Signal the child and its processes, as a terminal does."""
        os.killpg(self.pid, number)

    def processes(self) -> list[int]:
        """List the running processes of the session without the child itself."""
        running = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid and state != "Z":
                    running.add(int(path.parent.name))
        return sorted(running - {self.pid})

    def kill(self) -> None:
        """Kill the whole session, and wait for its end."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                # before its setsid the group does not exist
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """Wait for the end; return the status, negative after a fatal signal."""
        while self.status is None and self.read(1.0):
            pass
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pipe)
        return self.status

    def output(self) -> str:
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def child(work: Work, log: Path) -> Iterator[Child]:
    """Start a child and kill it at the end of the ``with`` statement."""
    process = Child(work, log)
    try:
        yield process
    finally:
        process.kill()


def _run(work: Work, writing: int, reading: int, log: Path) -> None:
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
        reset_loggers()  # those of earlier runs of the parent
        # loading workers of the parent are not children of this process
        multiprocessing.process._children = set()
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        # as in a fresh interpreter, not as pytest has set them
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in TERMINATING:
            signal.signal(number, signal.SIG_DFL)

        def report(phase: str) -> None:
            os.write(writing, f"{phase}\n".encode())

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


def training(args: argparse.Namespace) -> Work:
    """Return work that trains and reports its phases."""

    def work(report: Callable[[str], None]) -> None:
        report_phases(report)
        launch_from_args(run_main, args)

    return work


def report_phases(report: Callable[[str], None]) -> None:
    """Report steps, checkpoint writes and evaluations of this process."""
    write = AtomicPathManager.open

    @contextlib.contextmanager
    def during(phase: str) -> Iterator[None]:
        report(phase)
        yield
        report(OTHER)

    @contextlib.contextmanager
    def open_atomic(
        manager: AtomicPathManager, path: str, mode: str = "r", **options: Any
    ) -> Iterator[Any]:
        phase = (
            CHECKPOINT if "w" in mode and not path.endswith("config.yaml") else OTHER
        )
        with during(phase), write(manager, path, mode, **options) as file:
            yield file

    Trainer.run_step = during(STEP)(Trainer.run_step)
    Trainer.test = classmethod(during(EVALUATION)(Trainer.test.__func__))
    AtomicPathManager.open = open_atomic
