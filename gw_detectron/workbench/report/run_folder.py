"""Read the files of a run folder."""

import contextlib
import io
import json
import logging
import os
import shlex
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager
from pycocotools.coco import COCO

from ...config import read_config
from ...errors import (
    ConfigError,
    DataError,
    MissingFileError,
    check_minimum,
)
from ...weights import best_checkpoint, read_weights_file
from ...weights.opening import BEST_CHECKPOINT
from ..dataset.coco_scores import COCO_TASKS
from ..dataset.source import own_source
from ..run.evaluation import drop_info
from ..run.folder import (
    BEST_PREDICTIONS,
    CONVERTED,
    METRICS,
    PREDICTIONS,
    RESULT,
    read_metrics,
)
from ..run.run_datasets import use_recorded_datasets
from .detections import Detections, ImageMatches, is_usable_result

log = logging.getLogger(__name__)


class RunFolder:
    """The folder of a training, or of an evaluation.

    An evaluation after the training leaves its config in ``inference``, which then decides which
    weights and dataset belong to the predictions: a training removes it. Properties raise a user
    error if a file is missing or damaged.

    Args:
        folder: ``OUTPUT_DIR`` of the run.
        images: number of images that its report draws with predictions, and with errors.
        score: lowest score of a detection, for errors and pictures; None takes that of the highest F1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        images: int = 4,
        score: float | None = None,
    ) -> None:
        check_minimum("--images", images)
        if score is not None and not 0 <= score <= 1:
            raise ConfigError(
                f"--score ({score}): not between 0 and 1. Fix: give e.g. 0.5."
            )
        self.folder = Path(folder)
        self.most_drawn = images
        self._score = score
        #: what the labels differ in from those of the run, and what was completed in them
        self.notes: list[str] = []

        evaluated = self.folder / "inference" / "config.yaml"
        self.is_evaluated = evaluated.is_file()
        self.config_file = (
            evaluated if self.is_evaluated else self.folder / "config.yaml"
        )
        if not self.config_file.is_file():
            raise MissingFileError(
                f"RUN ('{folder}'): no config.yaml. Fix: give the OUTPUT_DIR of a run of "
                "gw-detectron train."
            )
        self.cfg: CfgNode = read_config(self.config_file)

    @property
    def score(self) -> float:
        """The lowest score of a detection, for errors and pictures."""
        if self._score is None:
            return self.detections.best_threshold[0]
        return self._score

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.json``, by iteration."""
        path = self.folder / METRICS
        records = read_metrics(path)
        if not records:
            raise MissingFileError(
                f"'{path}': no record of an iteration. A training writes one every 20 iterations."
            )
        return records

    def logged(self, name: str) -> list[tuple[int, float]]:
        """Return the iterations of the records with a metric, and its values."""
        return [
            (record["iteration"], record[name])
            for record in self.metrics
            if isinstance(record.get(name), (int, float))
        ]

    @property
    def metric_names(self) -> list[str]:
        """The sorted names of all metrics."""
        names = set().union(*self.metrics)
        return [name for name in sorted(names) if self.logged(name)]

    @property
    def seconds_per_iteration(self) -> float:
        """The median of the logged times; 0 without one."""
        times = [seconds for _, seconds in self.logged("time")]
        return statistics.median(times or [0.0])

    @property
    def weights(self) -> str:
        """The path of the best or last checkpoint, or the ``MODEL.WEIGHTS`` of an evaluation."""
        if self.is_evaluated:
            return self.cfg.MODEL.WEIGHTS
        return best_checkpoint(str(self.folder))

    @property
    def has_best_weights(self) -> bool:
        """Whether the weights are those of ``TEST.BEST``."""
        return not self.is_evaluated and self.weights.endswith(BEST_CHECKPOINT)

    @cached_property
    def best_iteration(self) -> int | None:
        """The iterations behind ``model_best.pth``; None if the weights are others."""
        if not self.has_best_weights:
            return None
        content = read_weights_file(self.weights).value
        iteration = content.get("iteration") if isinstance(content, dict) else None
        return iteration + 1 if isinstance(iteration, int) else None

    @property
    def dataset(self) -> str:
        """The dataset of the predictions, the last one evaluated; "" for none."""
        names = self.cfg.DATASETS.TEST
        return names[-1] if names else ""

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The images of the dataset, as Detectron2 describes them."""
        has_predictions = (self.folder / "inference").is_dir()
        if (self.folder / RESULT).is_file() and not has_predictions:
            raise MissingFileError(
                f"RUN ('{self.folder}'): gw-detectron compare keeps scores and curves of its runs, but no weights, "
                "predictions and split datasets. Fix: see comparison.html, or train with its recommended.yaml."
            )

        use_recorded_datasets(self.cfg, self.config_file, str(self.folder))
        source = own_source(self.dataset)
        if source is not None:
            self.notes = [f"{self.dataset}: {note}" for note in source.notes]
        for note in self.notes:
            log.warning(note)

        if self.dataset not in DatasetCatalog.list():
            raise DataError(
                f"DATASETS.TEST ('{self.dataset}'): not registered. Fix: register it in Python "
                "first."
            )
        return DatasetCatalog.get(self.dataset)

    @cached_property
    def detections(self) -> Detections:
        """The predictions of the best weights, or of the last evaluation, with the truth."""
        records = {record["image_id"]: record for record in self.records}
        truth = self._truth()
        results = self._results(truth)
        complete = set(results[0]).intersection(*results) if results else {"bbox"}
        return Detections(
            cfg=self.cfg,
            metadata=MetadataCatalog.get(self.dataset),
            records=records,
            truth=truth,
            results=results,
            tasks=[
                name for name, task in COCO_TASKS.items() if task.result_key in complete
            ],
        )

    def _results(self, truth: COCO) -> list[dict[str, Any]]:
        """Read the predictions, which are of the images and classes of the dataset."""
        name = BEST_PREDICTIONS if self.has_best_weights else PREDICTIONS
        path = self.folder / "inference" / name
        fix = f"Fix: evaluate again, by `{shlex.join(self._evaluation_command())}`."
        try:
            results = json.loads(path.read_text())
            if not isinstance(results, list):
                raise TypeError("not a list of results")
            unusable = [row for row in results if not is_usable_result(row, truth)]
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise DataError(f"'{path}': cannot be read: {error}. {fix}") from error

        if unusable:
            raise DataError(
                f"'{path}': {len(unusable)} of {len(results)} entries are no predictions on the "
                f"images and classes of '{self.dataset}'. {fix}"
            )
        return results

    def _evaluation_command(self) -> list[str]:
        command = ["gw-detectron", "eval"]
        if not self.is_evaluated:
            return [*command, str(self.folder)]
        # perhaps without a training in the folder
        config = ["--config-file", str(self.config_file)]
        return [*command, *config, "OUTPUT_DIR", str(self.folder)]

    def _truth(self) -> COCO:
        # of a dataset registered in Python
        converted = self.folder / "inference" / f"{self.dataset}{CONVERTED}"
        json_file = MetadataCatalog.get(self.dataset).get("json_file", str(converted))
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(PathManager.get_local_path(json_file))
        drop_info(truth)
        if not truth.anns:
            raise DataError(
                f"'{json_file}': no annotations. Fix: evaluate on images with objects."
            )
        return truth

    @cached_property
    def matches(self) -> list[ImageMatches]:
        """The detections of every image, matched to its objects."""
        return self.detections.match(self.score)
