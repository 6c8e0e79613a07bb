"""The output folder of a run: its lock, its checkpoints, its metrics, and clearing what an earlier run left."""

import fcntl
import json
import logging
import operator
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from ...errors import CheckReport, ConfigError, FileAccessError, RunError
from ...weights import LazyCheckpoint
from ...weights.opening import (
    BEST_CHECKPOINT,
    FINAL_CHECKPOINT,
    PERIODIC_CHECKPOINTS,
)

log = logging.getLogger(__name__)

METRICS = "metrics.json"  # to which a trainer appends
# begins the names of losses on the validation data, in METRICS
VALIDATION_PREFIX = "validation/"
RESULT = "result.json"  # scores of a run of gw-detectron compare, which then removes the large files
PREDICTIONS = "coco_instances_results.json"  # of Detectron2's evaluator, in its folder "inference"
BEST_PREDICTIONS = "model_best_results.json"  # predictions of model_best.pth, beside it
# ends the names of annotations that Detectron2 has converted
CONVERTED = "_coco_format.json"
_LOCK = ".training.lock"
_OTHER_CHECKPOINT = (
    "Fix: write the name of another checkpoint into last_checkpoint, or start again with --overwrite "
    "instead of --resume."
)
# by which later commands find a detector
_DETECTORS = ("last_checkpoint", FINAL_CHECKPOINT, BEST_CHECKPOINT)
# Detectron2 would reuse the converted annotations even if the dataset has changed.
_EVALUATION = (
    f"inference/{PREDICTIONS}",
    "inference/config.yaml",
    f"inference/*{CONVERTED}*",
)
# config.yaml, datasets.yaml and datasets/ stay until the new run, which may read them, writes its own. log.txt stays.
_EVENTS = "events.out.tfevents.*"  # of TensorBoard
_RUN = (*_DETECTORS, PERIODIC_CHECKPOINTS, METRICS, _EVENTS)
_EVALUATIONS = ("inference", "inference_TTA", "inference_mixed", "inference_adapted")
_FOLDERS = (*_EVALUATIONS, "report")


def lock_output(folder: str, *, wait: bool = False) -> IO[str]:
    """Refuse a second run in an output folder, or wait for its end; closing the returned file releases the lock.

    The lock is a POSIX one: it ends with the process, also a killed one, and data-loading workers do not inherit it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, _LOCK), "a+")  # noqa: SIM115, open until the lock is released
    except OSError as error:
        raise FileAccessError(
            f"OUTPUT_DIR ('{folder}'): cannot be written: {error}. Fix: give another OUTPUT_DIR, as the last words; a "
            "RUN to evaluate may be read-only."
        ) from error

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip() or "just started"
        file.close()
        raise RunError(
            f"OUTPUT_DIR ('{folder}'): another run writes there ({holder}). Fix: give another OUTPUT_DIR, or "
            "stop that run."
        ) from None
    except OSError as error:
        log.warning(
            "OUTPUT_DIR ('%s'): its file system has no locks (%s): start one run only",
            folder,
            error,
        )
        return file

    file.truncate(0)
    file.write(
        f"host {os.uname().nodename}, process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    )
    file.flush()
    return file


def check_output(
    folder: str,
    start: LazyCheckpoint,
    report: CheckReport,
    *,
    resume: bool | None,
    keeps: bool,
    best: str = "",
) -> None:
    """Check that a run finds its checkpoint, overwrites none that it ``keeps``, and can write its folders."""
    for name in ("datasets", *_FOLDERS):
        path = Path(folder, name)
        if path.is_symlink() and not path.exists():
            report.errors.append(
                f"OUTPUT_DIR: '{path}' is a link to '{os.readlink(path)}', which does not exist. Fix: mount or create "
                "that folder, or remove the link."
            )

    has_best = Path(folder, BEST_CHECKPOINT).is_file()
    if start.resumed:
        if start.error:
            reason = str(start.error).partition(" Fix: ")[0]
            report.errors.append(f"{reason} {_OTHER_CHECKPOINT}")
        if keeps and not best and has_best:
            report.errors.append(
                f"TEST.BEST (''): the run kept {BEST_CHECKPOINT} by a score, and commands would take it also later. "
                "Fix: set TEST.BEST as in that run, or move the file elsewhere."
            )
    elif resume and os.path.lexists(os.path.join(folder, FINAL_CHECKPOINT)):
        report.errors.append(
            f"--resume: '{folder}/last_checkpoint', which names the checkpoint, is missing. "
            f"{_OTHER_CHECKPOINT}"
        )
    elif resume:
        report.warnings.append(
            f"--resume: no checkpoint in '{folder}'. The run starts from MODEL.WEIGHTS."
        )
    elif keeps and any(Path(folder, name).is_file() for name in _DETECTORS):
        report.errors.append(earlier_run(folder))


def earlier_run(folder: str) -> str:
    """Describe an output folder that holds another run."""
    return (
        f"OUTPUT_DIR ('{folder}'): contains checkpoints of an earlier run. Fix: continue it with --resume "
        "(resume_or_load(resume=True)), replace it with --overwrite (Trainer(cfg, overwrite=True)), or give another."
    )


def stale_output(
    folder: str,
    *,
    metrics: bool = False,
    best: bool = False,
    everything: bool = False,
    needed: Iterable[str] = (),
) -> list[Path]:
    """Return the files that a report would take for the new run's, and that the run removes when it begins.

    These are results of an evaluation, on request also the ``metrics`` and events, to which a new run would
    append, the ``best`` weights of a run without a checkpoint, or ``everything`` of an earlier run
    but its log. Folders such as ``inference`` are the user's if no run was there.

    A checkpoint that is ``needed`` by the new run is left out. If commands would take it for the new run's, or a needed
    file is in a folder to remove, it is a ConfigError. So are linked metrics: a trainer opens them, and then empties
    what it has opened.
    """
    patterns = list(_EVALUATION)
    if metrics:
        patterns += [METRICS, _EVENTS, f"inference/{BEST_PREDICTIONS}"]
    if best:
        patterns.append(BEST_CHECKPOINT)
    if everything:
        patterns += [*_RUN, *_folders_of_run(folder)]

    kept = [Path(path).resolve() for path in needed]
    stale = []
    for path in dict.fromkeys(
        path for pattern in patterns for path in Path(folder).glob(pattern)
    ):
        if path.name == METRICS and path.is_symlink():
            raise ConfigError(
                f"OUTPUT_DIR: '{path}' is a link, and a new run would empty '{path.resolve()}'. Fix: remove the link, "
                "or give another OUTPUT_DIR."
            )
        inside = [file for file in kept if file.is_relative_to(path.resolve())]
        if not inside:
            stale.append(path)
        elif path.is_dir() or path.name in _DETECTORS:
            raise ConfigError(
                f"--overwrite: would remove '{path}', but the run reads '{inside[0]}'. Fix: move the "
                "file elsewhere, or give another OUTPUT_DIR."
            )
    return stale


def _folders_of_run(folder: str) -> list[str]:
    """Return the names of the folders that a run and its report have written; none where no run was."""
    marks = [Path(folder, name) for name in ("config.yaml", *_DETECTORS)]
    if not Path(folder, "log.txt").is_file() or not any(map(Path.exists, marks)):
        return []

    names = list(_FOLDERS)
    if not Path(folder, "report", "report.html").is_file():
        names.remove("report")
    return names


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files, folders and links; empty the metrics, which a writer may have opened."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name == METRICS and path.exists():
            os.truncate(path, 0)
        else:
            path.unlink(missing_ok=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run: one dict per iteration, in order; none without the file.

    A line cut off by a kill, without an iteration, or with an integer beyond float64 is skipped. If a resumed run
    repeated an iteration, the later record counts.
    """
    if not path.is_file():
        return []
    by_iteration: dict[int, dict[str, Any]] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line, parse_int=lambda digits: int(float(digits)))
            iteration = operator.index(record["iteration"])
            by_iteration.setdefault(iteration, {}).update(record)
        # no JSON, of other software, or damaged
        except (ArithmeticError, KeyError, RecursionError, TypeError, ValueError):
            continue
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]
