"""The files of a run in its output folder: metrics, predictions, and the removal of an earlier run."""

import itertools
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import ConfigError

METRICS = "metrics.json"  # to which a trainer appends
PREDICTIONS = "coco_instances_results.json"  # of Detectron2's evaluator, in its folder "inference"
CONVERTED = "_coco_format.json"  # the end of the name of annotations that it has converted, after that of the dataset
# config.yaml, datasets.yaml and datasets/ stay: the new run may read them, and writes its own
_FILES = ("model_*.pth", "last_checkpoint", METRICS, "log.txt", "log.txt.rank*", "events.out.tfevents.*")
_FOLDERS = ("inference", "inference_TTA", "report")


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


def end_last_line(folder: str) -> None:
    """End a line of the metrics that a kill has cut off, so that the next record is a line of its own.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(folder, METRICS)
    if "://" not in folder and path.is_file():
        with open(path, "rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read() not in (b"", b"\n"):
                file.write(b"\n")


def remove_evaluation(folder: str, *, needed: Collection[str] = (), config: bool = True) -> None:
    """Remove what an earlier evaluation has left and a report would take for that of the new run.

    These are its predictions, and the config that ``--eval-only`` has written beside them.

    Args:
        folder: the output folder, which need not exist; nothing is removed from a remote one.
        needed: files that the new run reads; they stay.
        config: False keeps the config, which a new evaluation replaces.

    Raises:
        OSError: a file cannot be removed.
    """
    if "://" not in folder:
        place, kept = Path(folder, "inference"), _resolved(needed)
        for name in (PREDICTIONS, *(["config.yaml"] if config else [])):
            if (place / name).resolve() not in kept:
                (place / name).unlink(missing_ok=True)


def remove_converted_annotations(folder: str) -> None:
    """Remove the annotations that Detectron2 has converted: it reads them again, even if the dataset has changed.

    Args:
        folder: the output folder, which need not exist; nothing is removed from a remote one.

    Raises:
        OSError: a file cannot be removed.
    """
    if "://" not in folder:
        for path in Path(folder, "inference").glob(f"*{CONVERTED}*"):  # and its .lock
            path.unlink(missing_ok=True)


def remove_earlier_run(folder: str, *, everything: bool, needed: Collection[str] = ()) -> None:
    """Remove the metrics of an earlier run, to which a new one would append, or also its checkpoints, log and results.

    Args:
        folder: the output folder, which need not exist; nothing is removed from a remote one.
        everything: False removes the metrics alone.
        needed: files that the new run reads, perhaps of the earlier run; they stay.

    Raises:
        ConfigError: a needed file is in a folder that would be removed; nothing is removed.
        OSError: a file cannot be removed.
    """
    if "://" in folder:
        return
    place, kept = Path(folder), _resolved(needed)
    folders = [place / name for name in _FOLDERS if everything and (place / name).is_dir()]
    for path, removed in itertools.product(kept, folders):
        if path.is_relative_to(removed.resolve()):
            raise ConfigError(
                f"--overwrite: would remove '{path}', which the run reads, with the folder '{removed}'. Fix: move the "
                "file elsewhere, or give another OUTPUT_DIR."
            )
    for pattern in _FILES if everything else (METRICS,):
        for path in place.glob(pattern):
            if path.resolve() not in kept:
                path.unlink()
    for removed in folders:
        shutil.rmtree(removed)


def _resolved(paths: Collection[str]) -> list[Path]:
    return [Path(path).resolve() for path in paths if path]
