"""Run the rows of the study as processes side by side."""

import dataclasses
import fnmatch
import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..job_runner import LOG, run_jobs, start_python
from .plan import Row, planned_rows
from .results_file import read_results


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
    words = [json.dumps(dataclasses.asdict(row)), str(folder), str(results), *options]
    return start_python(["-m", "experiments.small_batch.single_run", *words], folder, OMP_NUM_THREADS="1")


def run_rows(
    results_path: Path,
    start: Callable[[Row], subprocess.Popen],
    jobs: int,
    only: Sequence[str] = (),
    report: Callable[[str], object] = print,
) -> list[Row]:
    """Run all open rows, ``jobs`` at a time; see :func:`.run_jobs`.

    Args:
        results_path: the file to which the processes append.
        start: starts the process of a row.
        jobs: processes at a time.
        only: see :func:`open_rows`.
        report: called with a line of progress.

    Returns:
        The rows that failed.
    """

    def ready() -> list[Row]:
        return [row for row in open_rows(read_results(results_path), only) if row.lr is not None]

    def reported_start(row: Row) -> subprocess.Popen:
        process = start(row)
        report(f"start {row.name}")
        return process

    def ended(row: Row, status: int) -> bool:
        results = read_results(results_path)
        report(_progress(row, results, status))
        left = open_rows(results, only)
        hours = estimate_hours(left, results, jobs)
        report(f"{len(results)} finished, {len(left)} left" + (f", about {hours:.1f} h" if hours else ""))
        return row in results

    return run_jobs(ready, reported_start, jobs, ended)


def _progress(row: Row, results: Mapping[Row, Mapping[str, Any]], status: int) -> str:
    if row not in results:
        return f"FAILED {row.name}: exit status {status}, see {LOG} in its folder"
    result = results[row]
    end = result["diverged"] or f"AP {result['AP']:.1f} on {row.split}"
    return f"done {row.name}: {end}, {result['seconds']:.0f} s"
