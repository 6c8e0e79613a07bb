"""Run jobs as processes, some at a time; finished ones are skipped, failed ones do not stop the others."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

Job = TypeVar("Job")
LOG = "process.txt"
_ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.2


def start_python(words: Sequence[str], folder: Path, **variables: str) -> subprocess.Popen:
    """Start Python with this repository on its path; the output is appended to :data:`LOG` of a folder.

    Args:
        words: of the command after ``python``.
        folder: created if needed.
        variables: of the environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    with open(folder / LOG, "a") as log:
        return subprocess.Popen([sys.executable, *words], stdout=log, stderr=subprocess.STDOUT, env=environment)


def run_jobs(
    ready: Callable[[], Iterable[Job]],
    start: Callable[[Job], subprocess.Popen],
    count: int,
    ended: Callable[[Job, int], bool],
) -> list[Job]:
    """Run all jobs, ``count`` at a time.

    After an error or a signal the running processes are ended; they write a checkpoint, which the next call continues.

    Args:
        ready: returns the unfinished jobs that can run, in their order; a finished job can make others ready.
        start: starts the process of a job.
        count: processes at a time.
        ended: called with a job and its exit status; returns whether the job is finished.

    Returns:
        The jobs that failed.
    """
    running: dict[Job, subprocess.Popen] = {}
    failed: list[Job] = []
    try:
        while True:
            waiting = [job for job in ready() if job not in failed and job not in running]
            for job in waiting[: count - len(running)]:
                running[job] = start(job)
            if not running:
                return failed
            while not (done := [job for job, process in running.items() if process.poll() is not None]):
                time.sleep(_POLL_SECONDS)
            for job in done:
                if not ended(job, running.pop(job).returncode):
                    failed.append(job)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
