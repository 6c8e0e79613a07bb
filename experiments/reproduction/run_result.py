"""Result of a run of tools/train_net.py, from the files that it wrote, and how the run differs from its row."""

import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gw_detectron.checkpoint import NORMS, open_checkpoint
from gw_detectron.checkpoint.records import RUN_RECORD, config_differences
from gw_detectron.config import read_config
from gw_detectron.engine.output_folder import METRICS, read_metrics
from gw_detectron.errors import ConfigError
from gw_detectron.model_zoo import get_config_file

#: keys that do not change what is trained and measured
HARMLESS = {
    "DATALOADER.NUM_WORKERS",
    "MODEL.DEVICE",
    "OUTPUT_DIR",
    "SEED",
    "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_PERIOD",
    "VIS_PERIOD",
}
_EVALUATION = re.compile(r"(bbox|sem_seg)/")
_METRIC = re.compile(r"(bbox|segm)/AP(50|75)?")
# norms whose batch is that of one process
_BATCH_NORM = re.compile(r"(?!.*sync=True)(BN|BRN|BW)(:|$)")


def final_metrics(folder: Path) -> dict[str, float] | None:
    """Return box and mask AP after the last iteration of a run, in percent; None before that evaluation.

    Args:
        folder: OUTPUT_DIR of the run.
    """
    if not (folder / "config.yaml").is_file() or not (folder / "model_final.pth").is_file():
        return None
    last = read_config(str(folder / "config.yaml")).SOLVER.MAX_ITER - 1
    final = [line for line in read_metrics(folder / METRICS) if line["iteration"] >= last]  # Detectron2 writes last + 1
    evaluations = [line for line in final if any(map(_EVALUATION.match, line))]
    if not evaluations:
        return None
    found = {name: value for name, value in evaluations[-1].items() if _METRIC.fullmatch(name)}
    # without any detection the AP is NaN
    return {name: 0.0 if math.isnan(value) else round(value, 3) for name, value in found.items()}


def read_run(config: str, gpus: int, folder: Path, log: str) -> dict[str, Any] | None:
    """Return the record of a finished run; None before its end.

    Args:
        config: name of the row's config.
        gpus: the row's number of GPUs.
        folder: OUTPUT_DIR of the run.
        log: path or address of its log.

    Returns:
        ``config``, the AP, ``changes`` (how the run differs from the row: {} or key -> description), ``commits`` (with
        ``-dirty`` after local changes), ``versions``, ``processes``, ``seed``, ``start_weights``, ``seconds`` (median
        time of an iteration, times iterations) and ``log``.

    Raises:
        ConfigError: the checkpoint has no record of its run.
    """
    metrics = final_metrics(folder)
    if metrics is None:
        return None
    metadata = open_checkpoint(str(folder / "model_final.pth")).metadata
    record = metadata.get(RUN_RECORD, {})
    parts = [*record.get("earlier_parts", ()), record]
    if any("processes" not in part for part in parts):
        raise ConfigError(f"'{folder / 'model_final.pth'}': no record of its run. Fix: train it with this version.")
    times = [line["time"] for line in read_metrics(folder / METRICS) if "time" in line]
    iterations = read_config(str(folder / "config.yaml")).SOLVER.MAX_ITER
    return {
        "config": config,
        **metrics,
        "changes": _changes(config, gpus, parts, metadata.get(NORMS, {})),
        "commits": list(dict.fromkeys(part["versions"].get("commit", "unknown") for part in parts)),
        "versions": record["versions"],
        "processes": record["processes"],
        "seed": record["seed"],
        "start_weights": record["start_weights"],
        "seconds": round(statistics.median(times) * iterations) if times else 0,
        "log": log,
    }


def changed_options(folder: Path, config: str, options: list[str]) -> dict[str, str]:
    """Describe how the run in a folder differs from the one that is to be continued there: key -> description."""
    file = folder / "config.yaml"
    if not file.is_file():
        return {}
    return _differences(file.read_text(), read_config(get_config_file(config), options).dump(), "the folder")


def _changes(config: str, gpus: int, parts: list[Mapping[str, Any]], norms: Mapping[str, str]) -> dict[str, str]:
    """Compare all parts of a run with its row; a row with batch statistics has a number of GPUs, too."""
    row = read_config(get_config_file(config)).dump()
    changes = {}
    for part in parts:
        changes |= _differences(row, part["config"], "the row")
        if part["processes"] != gpus and any(map(_BATCH_NORM.match, norms.values())):
            changes["--num-gpus"] = f"{gpus} in the row, {part['processes']} here"
    return changes


def _differences(config: str, other: str, place: str) -> dict[str, str]:
    return {
        key: text.removeprefix(f"{key} ").replace("the checkpoint", place)
        for key, text in config_differences({"config": config}, other).items()
        if key not in HARMLESS
    }
