"""Remove an earlier run from an output folder."""

import os
import shutil
from pathlib import Path

METRICS = "metrics.json"  # to which a trainer appends
# config.yaml, datasets.yaml and datasets/ stay: the new run may read them, and writes its own
_FILES = ("model_*.pth", "last_checkpoint", METRICS, "log.txt", "log.txt.rank*", "events.out.tfevents.*")
_FOLDERS = ("inference", "inference_TTA", "report")


def remove_predictions(folder: str) -> None:
    """Remove the predictions of an earlier evaluation, which the next one replaces.

    If that one fails, a report would judge them by its dataset.

    Raises:
        OSError: the file cannot be removed.
    """
    if "://" not in folder:
        Path(folder, "inference", "coco_instances_results.json").unlink(missing_ok=True)


def remove_earlier_run(folder: str, *, everything: bool, keep: str = "") -> None:
    """Remove the metrics of an earlier run, to which a new one would append, or also its checkpoints, log and results.

    Args:
        folder: the output folder, which need not exist; nothing is removed from a remote one.
        everything: False removes the metrics alone.
        keep: the start weights, which may be a checkpoint of the earlier run.

    Raises:
        OSError: a file cannot be removed.
    """
    if "://" in folder:
        return
    place = Path(folder)
    for pattern in _FILES if everything else (METRICS,):
        for path in place.glob(pattern):
            if not (keep and os.path.exists(keep) and path.samefile(keep)):
                path.unlink()
    for name in _FOLDERS if everything else ():
        if (place / name).is_dir():
            shutil.rmtree(place / name)
