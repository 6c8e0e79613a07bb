"""Run the rows of the study as processes side by side."""

import dataclasses
import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .plan import Row, planned_rows
from .results_file import read_results

_ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.2


def open_rows(results: Mapping[Row, Mapping[str, Any]], only: Sequence[str] = ()) -> list[Row]:
    """Return the unfinished rows in their order.

    Args:
        results: of finished rows.
        only: shell patterns of row names, such as ``GW_b2_*``; empty means all rows.
    """
    rows = planned_rows({row: result["AP"] for row, result in results.items()})
    patterns = only or ("*",)
    return [row for row in rows if row not in results and any(fnmatch.fnmatchcase(row.name, p) for p in patterns)]


def estimate_hours(rows: Iterable[Row], results: Mapping[Row, Mapping[str, Any]], jobs: int) -> float | None:
    """Estimate the time of rows from the time per training image so far; None before the first result."""
    images = sum(row.batch * row.iterations for row in results)
    if not images:
        return None
    seconds = sum(result["seconds"] for result in results.values()) / images
    return seconds * sum(row.batch * row.iterations for row in rows) / jobs / 3600


def start_row(row: Row, output: Path, results: Path, options: Sequence[str] = ()) -> subprocess.Popen:
    """Start a row in a process with one thread, which logs to a folder of the row's name."""
    folder = output / row.name
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    words = [json.dumps(dataclasses.asdict(row)), str(folder), str(results), *options]
    command = [sys.executable, "-m", "experiments.small_batch.single_run", *words]
    with open(folder / "process.txt", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def run_rows(
    results_path: Path,
    start: Callable[[Row], subprocess.Popen],
    jobs: int,
    only: Sequence[str] = (),
    report: Callable[[str], object] = print,
) -> list[Row]:
    """Run all open rows, ``jobs`` at a time.

    After an error or a signal the running processes are ended; they write a checkpoint, which the next call continues.

    Args:
        results_path: the file to which the processes append.
        start: starts the process of a row.
        jobs: processes at a time.
        only: see :func:`open_rows`.
        report: called with a line of progress.

    Returns:
        The rows that failed.
    """
    running: dict[Row, subprocess.Popen] = {}
    failed: list[Row] = []
    try:
        while True:
            results = read_results(results_path)
            left = [row for row in open_rows(results, only) if row not in failed]
            waiting = [row for row in left if row.lr is not None and row not in running]
            for row in waiting[: jobs - len(running)]:
                running[row] = start(row)
                report(f"start {row.name}")
            if not running:
                return failed
            while not (ended := [row for row, process in running.items() if process.poll() is not None]):
                time.sleep(_POLL_SECONDS)
            results = read_results(results_path)
            for row in ended:
                status = running.pop(row).returncode
                if row not in results:
                    failed.append(row)
                report(_progress(row, results, status))
            left = open_rows(results, only)
            hours = estimate_hours(left, results, jobs)
            report(f"{len(results)} finished, {len(left)} left" + (f", about {hours:.1f} h" if hours else ""))
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _progress(row: Row, results: Mapping[Row, Mapping[str, Any]], status: int) -> str:
    if row not in results:
        return f"FAILED {row.name}: exit status {status}, see process.txt in its folder"
    result = results[row]
    end = result["diverged"] or f"AP {result['AP']:.1f} on {row.split}"
    return f"done {row.name}: {end}, {result['seconds']:.0f} s"
