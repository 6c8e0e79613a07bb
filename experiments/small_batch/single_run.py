"""Train and evaluate one row of the study in this process.

The last checkpoint of an interrupted run is continued. Checkpoints of a finished run are removed: those of the whole
study would need tens of gigabytes.
"""

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import build_detection_train_loader
from detectron2.modeling import build_model
from detectron2.utils.env import seed_all_rng

from benchmarks.environment import machine_name
from gw_detectron.checkpoint.records import software_versions
from gw_detectron.cli import errors_reported
from gw_detectron.config import read_config
from gw_detectron.engine import get_parser, main
from gw_detectron.engine.output_folder import METRICS, read_metrics
from gw_detectron.errors import NonFiniteError, first_line

from .features import feature_statistics
from .plan import Row
from .results_file import append_result

CONFIG = Path(__file__).with_name("faster_rcnn_R_18_FPN_small_batch.yaml")
_SCORES = ("AP", "AP50", "AP75")
_LOSSES = 24  # points of a curve
_FEATURE_IMAGES = 64


def run_row(row: Row, folder: Path, results: Path, options: Sequence[str] = ()) -> None:
    """Run a row and append its result.

    A run whose loss becomes infinite or NaN has AP 0.

    Args:
        row: the row; its learning rate is decided.
        folder: OUTPUT_DIR of the run.
        results: the file of results.
        options: more config keys, as KEY VALUE KEY VALUE.
    """
    # the checks refuse BN with one image, and FrozenBN without weights; the study measures both
    refused = row.batch == 1 or row.norm == "FrozenBN"
    flags = ["--resume", *(["--ignore-preflight"] if refused else [])]
    words = ["--config-file", str(CONFIG), *flags, *row.config_words(), "OUTPUT_DIR", str(folder), *options]
    start, diverged, evaluated = time.perf_counter(), "", None
    try:
        evaluated = main(get_parser().parse_args(words))
    except NonFiniteError as error:
        diverged = first_line(error)
    lines = read_metrics(folder / METRICS)
    times = [line["time"] for line in lines if "time" in line]
    losses = [(line["iteration"], round(line["total_loss"], 4)) for line in lines if "total_loss" in line]
    result = {
        **scores(evaluated),
        "diverged": diverged,
        "seconds": round(time.perf_counter() - start, 1),
        "seconds_per_iteration": round(statistics.median(times), 4) if times else None,
        "losses": losses[:: -max(1, len(losses) // _LOSSES)][::-1],  # with the last one
        "features": {} if diverged or row.split == "tune" else _features(folder, row.batch),
        "options": list(options),
        "machine": machine_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "threads": torch.get_num_threads(),
        "versions": software_versions(),
    }
    append_result(results, row, result)
    for checkpoint in (*folder.glob("*.pth"), folder / "last_checkpoint"):
        checkpoint.unlink(missing_ok=True)


def scores(evaluated: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the box AP of an evaluation in percent; 0 without any detection."""
    boxes = (evaluated or {}).get("bbox", {})
    found = {name: float(boxes.get(name, 0.0)) for name in _SCORES}
    return {name: 0.0 if math.isnan(value) else round(value, 3) for name, value in found.items()}


def _features(folder: Path, batch: int) -> dict[str, dict[str, float]]:
    """Measure the final model on the same training images for every row."""
    cfg = read_config(str(folder / "config.yaml"))
    model = build_model(cfg)
    DetectionCheckpointer(model).load(str(folder / "model_final.pth"))
    seed_all_rng(0)
    batches = itertools.islice(build_detection_train_loader(cfg), _FEATURE_IMAGES // batch)
    return feature_statistics(model, batches)


if __name__ == "__main__":
    with errors_reported():
        run_row(Row(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
