"""Read the files of a run folder."""

import contextlib
import io
import json
import math
import os
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager
from pycocotools.coco import COCO

from ...config import read_config
from ...errors import ConfigError, DataError, MissingFileError, check_minimum, summarize_names
from ...weights import best_checkpoint
from ...weights.opening import BEST_CHECKPOINT
from ..run.folder import BEST_PREDICTIONS, CONVERTED, METRICS, PREDICTIONS, read_metrics
from ..run.run_datasets import use_recorded_datasets
from .detections import RESULT_KEYS, Detections, ImageMatches


class RunFolder:
    """The folder of a training, or of an evaluation by ``--eval-only``.

    An evaluation after the training leaves its config in ``inference``, which then decides which weights and dataset
    belong to the predictions: a training removes it. Properties raise a user error if a file is missing or damaged.

    Args:
        folder: ``OUTPUT_DIR`` of the run.
        images: number of images that its report draws with predictions, and with errors.
        score: lowest score of a detection, for errors and pictures.
    """

    def __init__(
        self, folder: str | os.PathLike[str], images: int = 4, score: float = 0.5
    ) -> None:
        check_minimum("--images", images)
        if not 0 <= score <= 1:
            raise ConfigError(f"--score ({score}): not between 0 and 1. Fix: give e.g. 0.5.")
        self.folder, self.images, self.score = Path(folder), images, score
        trained, evaluated = (
            self.folder / place / "config.yaml" for place in (".", "inference")
        )
        self.is_evaluated = evaluated.is_file()
        self.config_file = evaluated if self.is_evaluated else trained
        if not self.config_file.is_file():
            raise MissingFileError(
                f"RUN_FOLDER ('{folder}'): no config.yaml. Fix: give the OUTPUT_DIR of a run of gw-detectron train."
            )
        self.cfg: CfgNode = read_config(str(self.config_file))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.json``, by iteration."""
        path = self.folder / METRICS
        if not (records := read_metrics(path)):
            raise MissingFileError(
                f"'{path}': no record of an iteration. A training writes one every 20 iterations."
            )
        return records

    @property
    def weights(self) -> str:
        """The path of the best or last checkpoint, or the ``MODEL.WEIGHTS`` of an evaluation."""
        return (
            self.cfg.MODEL.WEIGHTS if self.is_evaluated else best_checkpoint(str(self.folder))
        )

    @property
    def best_iteration(self) -> int | None:
        """The iterations behind ``model_best.pth``; None if the weights are others."""
        if self.is_evaluated or not self.weights.endswith(BEST_CHECKPOINT):
            return None
        name, sign = self.cfg.TEST.BEST, -1 if self.cfg.TEST.BEST.endswith("loss") else 1
        evaluated = [
            each for each in self.metrics if math.isfinite(each.get(name, math.nan))
        ]  # AP can be NaN
        return (
            max(evaluated, key=lambda each: sign * each[name])["iteration"] + 1
            if evaluated
            else None
        )

    @property
    def dataset(self) -> str:
        """The dataset of the predictions, the last one evaluated; "" for none."""
        return self.cfg.DATASETS.TEST[-1] if self.cfg.DATASETS.TEST else ""

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The images of the dataset, as Detectron2 describes them."""
        use_recorded_datasets(self.cfg, self.config_file, str(self.folder))
        if self.dataset not in DatasetCatalog.list():
            raise DataError(
                f"DATASETS.TEST ('{self.dataset}'): not registered. Fix: register it in Python first."
            )
        return DatasetCatalog.get(self.dataset)

    @cached_property
    def detections(self) -> Detections:
        """The predictions of the best weights, or of the last evaluation, with their ground truth."""
        best = self.folder / "inference" / BEST_PREDICTIONS
        path = (
            best
            if not self.is_evaluated and self.weights.endswith(BEST_CHECKPOINT)
            else best.with_name(PREDICTIONS)
        )
        opts = ["OUTPUT_DIR", str(self.folder), "MODEL.WEIGHTS", self.weights]
        words = [
            "gw-detectron",
            "train",
            "--eval-only",
            "--config-file",
            str(self.config_file),
            *opts,
        ]
        fix = f"Fix: run `{shlex.join(words)}`."
        try:
            results = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"'{path}': cannot be read: {error}. {fix}") from error
        records, truth = {each["image_id"]: each for each in self.records}, self._truth()
        unknown = {each["image_id"] for each in results} - truth.imgs.keys()
        unknown |= {each["category_id"] for each in results} - truth.cats.keys()
        if unknown:
            names = summarize_names(map(str, unknown))
            raise DataError(
                f"'{path}': has images or categories that '{self.dataset}' lacks ({names}). {fix}"
            )
        complete = {
            key
            for key in RESULT_KEYS.values()
            if results and all(key in each for each in results)
        }
        tasks = [task for task, key in RESULT_KEYS.items() if task == "bbox" or key in complete]
        return Detections(
            self.cfg, MetadataCatalog.get(self.dataset), records, truth, results, tasks
        )

    def _truth(self) -> COCO:
        converted = (
            self.folder / "inference" / f"{self.dataset}{CONVERTED}"
        )  # of a dataset registered in Python
        json_file = MetadataCatalog.get(self.dataset).get("json_file", str(converted))
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(PathManager.get_local_path(json_file))
        if not truth.anns:
            raise DataError(
                f"'{json_file}': no annotations. Fix: evaluate on images with objects."
            )
        return truth

    @cached_property
    def matches(self) -> list[ImageMatches]:
        """The detections of every image, matched to its objects."""
        return self.detections.match(self.score)
