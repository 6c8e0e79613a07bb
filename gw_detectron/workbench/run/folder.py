"""The output folder of a run: its lock, its checkpoints, its metrics, and clearing what an earlier run left."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import ConfigError, FileAccessError, PreflightReport, RunError
from ...weights import LazyCheckpoint
from ...weights.opening import BEST_CHECKPOINT

log = logging.getLogger(__name__)

METRICS = "metrics.json"  # to which a trainer appends
PREDICTIONS = (
    "coco_instances_results.json"  # of Detectron2's evaluator, in its folder "inference"
)
BEST_PREDICTIONS = "model_best_results.json"  # predictions of model_best.pth, beside it
CONVERTED = "_coco_format.json"  # ends the names of annotations that Detectron2 has converted
_LOCK = ".training.lock"
_DETECTORS = (
    "last_checkpoint",
    "model_final.pth",
    BEST_CHECKPOINT,
)  # by which later commands find one
# Detectron2 would reuse the converted annotations even if the dataset has changed.
_EVALUATION = (f"inference/{PREDICTIONS}", "inference/config.yaml", f"inference/*{CONVERTED}*")
_EARLIER = (
    ".earlier"  # ends the names of small files of an earlier run until the new one trains
)
_LOGS = ("log.txt", "log.txt.rank*", "events.out.tfevents.*", "*_run.txt")
# config.yaml, datasets.yaml and datasets/ stay: the new run may read them, and writes its own.
_RUN = ("model_*.pth", "last_checkpoint", METRICS, *_LOGS, f"*{_EARLIER}")
_FOLDERS = ("inference", "inference_TTA", "report")


def lock_output(folder: str, *, wait: bool = False) -> IO[str]:
    """Refuse a second training in an output folder, or wait for its end; closing the returned file releases the lock.

    The lock is a POSIX one: it ends with the process, also a killed one, and data-loading workers do not inherit it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, _LOCK), "a+")  # noqa: SIM115, open until the lock is released
    except OSError as error:
        raise FileAccessError(
            f"OUTPUT_DIR ('{folder}'): cannot be written: {error}."
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            holder = file.read().strip() or "just started"
            file.close()
            raise RunError(
                f"OUTPUT_DIR ('{folder}'): another training writes there ({holder}). Fix: give another folder, or "
                "stop that training."
            ) from None
        log.warning(
            "OUTPUT_DIR ('%s'): its file system has no locks (%s): start one training only",
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
    report: PreflightReport,
    *,
    resume: bool | None,
    keeps: bool,
    best: str = "",
) -> None:
    """Check that a run finds the checkpoint it continues from, and overwrites none that the folder ``keeps``."""
    found, unusable = (
        list(Path(folder).glob("*.pth")),
        (BEST_CHECKPOINT, os.path.basename(start.address)),
    )
    others = [
        path for path in found if path.name not in unusable and path.is_file()
    ]  # no link to a lost file
    newest = max(others, key=os.path.getmtime, default=None)
    fix = "Fix: start again with --overwrite instead of --resume; there is no other checkpoint."
    if newest:
        fix = f"Fix: write {newest.name}, the newest other one, into {folder}/last_checkpoint."
    if start.resumed:
        if start.error:
            report.errors.append(f"{str(start.error).partition(' Fix: ')[0]} {fix}")
        if keeps and not best and Path(folder, BEST_CHECKPOINT).is_file():
            report.errors.append(
                f"TEST.BEST (''): the run kept {BEST_CHECKPOINT} by a score, and commands would take it also later. "
                "Fix: set TEST.BEST as in that run, or move the file elsewhere."
            )
    elif resume and found:
        report.errors.append(
            f"--resume: '{folder}/last_checkpoint', which names the checkpoint, is missing. {fix}"
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


def clear_output(
    folder: str, *, metrics: bool = False, everything: bool = False, needed: str = ""
) -> list[Path]:
    """Delete stale evaluation output, so that a report does not mistake it for the new run's.

    On request it deletes the ``metrics``, to which a new run would append. Of ``everything`` of an earlier run it
    renames metrics and logs, and returns what is to be deleted when the new run trains, or to be given to
    :func:`restored_at_error`. A file ``needed`` by the new run stays; in a folder to delete it is a ConfigError.
    """
    kept = Path(needed).resolve() if needed else None
    started = [METRICS, f"inference/{BEST_PREDICTIONS}"] if metrics else []
    patterns = [*_EVALUATION, *started, *([*_RUN, *_FOLDERS] if everything else [])]
    matches = dict.fromkeys(path for pattern in patterns for path in Path(folder).glob(pattern))
    found = [
        path for path in matches if path.resolve() != kept or path.name == BEST_CHECKPOINT
    ]  # which commands take
    if inside := [path for path in found if kept and kept.is_relative_to(path.resolve())]:
        raise ConfigError(
            f"--overwrite: would remove '{inside[0]}', but the run reads '{kept}'. Fix: move the file elsewhere, or "
            "give another OUTPUT_DIR."
        )
    if not everything:
        remove_files(found)
        return []
    renamed = [
        path
        for path in found
        if re.search(rf"{METRICS}$|\.txt", path.name) and path.suffix != _EARLIER
    ]
    later = [path for path in found if path not in renamed]
    later += [path.replace(f"{path}{_EARLIER}") for path in renamed]
    for path in Path(folder).glob("*.yaml"):  # config.yaml, datasets.yaml
        later.append(Path(shutil.copy2(path, f"{path}{_EARLIER}")))
    return later


@contextlib.contextmanager
def restored_at_error(paths: list[Path]) -> Iterator[None]:
    """Give the files that :func:`clear_output` has renamed their names again if the new run is refused."""
    try:
        yield
    except BaseException:
        for path in paths:
            if path.suffix == _EARLIER and path.exists():
                path.replace(path.with_suffix(""))
        raise


def remove_files(paths: list[Path]) -> None:
    """Remove files and folders, and empty the list."""
    while paths:
        path = paths.pop()
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run: one dict per iteration, in order; none without the file.

    A line cut off by a kill, or without an iteration, is skipped. If a resumed run repeated an iteration, the later
    record counts.
    """
    by_iteration: dict[int, dict[str, Any]] = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
            by_iteration.setdefault(record["iteration"], {}).update(record)
        except (ValueError, KeyError, TypeError):  # no JSON, or of other software
            continue
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]
