"""Find what a run has left in its folder."""

import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager
from pycocotools.coco import COCO
from torch import nn

from ..checkpoint import Checkpoint, last_checkpoint, load_model, open_checkpoint
from ..config import read_config
from ..engine.run_datasets import use_recorded_datasets
from ..engine.run_files import CONVERTED, METRICS, PREDICTIONS, read_metrics
from ..errors import (
    ConfigError,
    DataError,
    MissingFileError,
    MissingInputError,
    check_minimum,
    is_user_error,
    summarize_names,
)
from ..modeling import build_checked_model
from .detections import Detections, ImageMatches


@dataclass(frozen=True)
class ReportOptions:
    """What a report shows.

    Args:
        images: number of images with predictions, and of those with errors.
        iou: lowest IoU of a match, for confusion and errors.
        score: lowest score of a detection, for confusion, errors and pictures.
        errors: draw missed objects and wrong boxes too.
        layers: norm layers to show; none takes up to three.
    """

    images: int = 4
    iou: float = 0.5
    score: float = 0.5
    errors: bool = False
    layers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_minimum("--images", self.images)
        for name, value, least in (("--iou", self.iou, 0.01), ("--score", self.score, 0)):
            if not least <= value <= 1:
                raise ConfigError(f"{name} ({value}): not between {least} and 1. Fix: give e.g. 0.5.")


class RunFolder:
    """The folder of a training, or of an evaluation by ``--eval-only``.

    The config in ``inference``, of an evaluation after the training, decides which weights and dataset belong to the
    predictions: a training removes it. A property raises MissingInputError if the folder lacks what it needs.

    Args:
        folder: ``OUTPUT_DIR`` of the run.
        options: what its report shows.

    Raises:
        MissingFileError: the folder or its ``config.yaml`` does not exist.
        ConfigError: the config cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], options: ReportOptions = ReportOptions()) -> None:
        self.folder, self.options = Path(folder), options
        places = (self.folder / "inference", self.folder)
        configs = [place / "config.yaml" for place in places if (place / "config.yaml").is_file()]
        if not configs:
            raise MissingFileError(
                f"RUN_FOLDER ('{folder}'): no config.yaml. Fix: give the OUTPUT_DIR of a run of gw-detectron train."
            )
        self.config_file = configs[0]
        self._evaluated = self.config_file.absolute().parent.name == "inference"
        self.cfg: CfgNode = read_config(str(self.config_file))

    def _command(self, *flags: str, **options: str) -> str:
        opts = {"OUTPUT_DIR": str(self.folder), **options}
        return shlex.join(
            ["gw-detectron", "train", *flags, "--config-file", str(self.config_file), *sum(opts.items(), ())]
        )

    @property
    def _training_command(self) -> str:
        """The command of the training; "" in a folder with checkpoints, where it is refused, or of an evaluation."""
        return "" if self._evaluated or any(self.folder.glob("model_*.pth")) else self._command()

    @property
    def metrics(self) -> list[dict]:
        """The records of ``metrics.json``."""
        with needed(self._training_command):
            path = self.folder / METRICS
            if not (records := read_metrics(path)):
                why, fix = "not found", "copy it from where the model was trained"
                if path.is_file():
                    why, fix = (
                        "no complete record; a training writes one every 20 iterations",
                        "continue it by --resume",
                    )
                raise MissingFileError(f"'{path}': {why}. Fix: {fix}.")
            return records

    @property
    def logged_scores(self) -> dict[str, float]:
        """The last logged value of each metric; none after an evaluation, which may be of another dataset."""
        return {} if self._evaluated else {name: value for each in self.metrics for name, value in each.items()}

    @property
    def training_time(self) -> str | None:
        """The duration of the training in ``log.txt``, of all finished parts of a resumed run."""
        log = self.folder / "log.txt"
        text = log.read_text(errors="replace") if log.is_file() else ""
        found = re.findall(r"Total training time: (?:(\d+) days?, )?(\d+):(\d+):(\d+) \(", text)
        parts = [timedelta(*(int(part or 0) for part in (days, s, 0, 0, m, h))) for days, h, m, s in found]
        return str(sum(parts, timedelta())) if parts else None

    @property
    def weights(self) -> str:
        """The path of the last checkpoint, or the ``MODEL.WEIGHTS`` of an evaluation, also in a moved folder."""
        if self._evaluated:
            path, before = (os.path.abspath(each) for each in (self.cfg.MODEL.WEIGHTS, self.cfg.OUTPUT_DIR))
            moved = self.config_file.absolute().parent.parent / os.path.relpath(path, before)
            was_inside = Path(path).is_relative_to(before) and not os.path.exists(path)
            return str(moved) if was_inside and moved.is_file() else self.cfg.MODEL.WEIGHTS
        with needed():
            return last_checkpoint(str(self.folder))

    @property
    def evaluated_iteration(self) -> int | None:
        """The iteration after which the training has logged its last AP; None without, or after an evaluation."""
        records = [] if self._evaluated else read_metrics(self.folder / METRICS)
        return max((each["iteration"] for each in records if any(key.endswith("/AP") for key in each)), default=None)

    def _is_of_another_iteration(self, iteration: int) -> bool:
        """Tell whether the weights are not those after an iteration; Detectron2 counts the last one once more."""
        try:
            trained = self.checkpoint.metadata.get("iteration")
        except MissingInputError:
            return False
        return isinstance(trained, int) and trained not in (iteration, iteration - 1)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The opened weights."""
        with needed(self._training_command):
            return open_checkpoint(self.weights)

    @cached_property
    def plain_model(self) -> nn.Module:
        """The model on the meta device, without weights."""
        with needed():
            return build_checked_model(self.cfg, "meta")

    @cached_property
    def model(self) -> nn.Module:
        """The trained model on the CPU, in evaluation mode."""
        checkpoint = self.checkpoint
        with needed():
            return load_model(self.cfg, checkpoint=checkpoint)

    @property
    def dataset(self) -> str:
        """The registered dataset of the predictions; "" for none.

        Each dataset's evaluation replaces the predictions of the one before.
        """
        return self.cfg.DATASETS.TEST[-1] if self.cfg.DATASETS.TEST else ""

    @cached_property
    def records(self) -> list[dict]:
        """The images of the dataset, as Detectron2 describes them."""
        with needed():
            use_recorded_datasets(self.cfg, self.config_file, str(self.folder), needed=[self.dataset])
            if not self.dataset:
                raise DataError("DATASETS.TEST (empty): no dataset to judge the run on.")
            if self.dataset not in DatasetCatalog.list():
                raise DataError(f"DATASETS.TEST ('{self.dataset}'): not registered. Fix: register it in Python first.")
            return DatasetCatalog.get(self.dataset)

    @cached_property
    def detections(self) -> Detections:
        """The predictions of the last evaluation, with their ground truth."""
        path = Path(self.config_file.parent, *([] if self._evaluated else ["inference"]), PREDICTIONS)
        with needed():
            if (name := self.cfg.MODEL.META_ARCHITECTURE) in ("SemanticSegmentor", "ProposalNetwork"):
                raise DataError(f"MODEL.META_ARCHITECTURE ('{name}'): predicts no objects. Fix: read metrics.json.")
        data = [] if self.dataset else ["--val-json", "FILE", "--val-images", "DIR"]
        command = self._command("--eval-only", *data, **{"MODEL.WEIGHTS": self.weights})
        with needed(command):
            if not path.is_file():
                raise MissingFileError(f"'{path}': not found.")
            try:
                results = json.loads(path.read_text())
            except json.JSONDecodeError as error:
                raise DataError(f"'{path}': not complete: {error}.") from error
            iteration = self.evaluated_iteration
            if iteration is not None and self._is_of_another_iteration(iteration):
                raise DataError(
                    f"'{path}': of iteration {iteration} in {METRICS}, not of the last checkpoint '{self.weights}'."
                )
        records, metadata = self.records, MetadataCatalog.get(self.dataset)
        with needed(), contextlib.redirect_stdout(io.StringIO()):
            json_file = metadata.get("json_file", str(path.parent / f"{self.dataset}{CONVERTED}"))
            truth = COCO(PathManager.get_local_path(json_file))
            if not truth.anns:
                raise DataError(f"'{json_file}': no annotations. Fix: evaluate on images with objects.")
        with needed(command):
            for what, key, known in (("images", "image_id", truth.imgs), ("categories", "category_id", truth.cats)):
                if unknown := {each[key] for each in results} - known.keys():
                    raise DataError(
                        f"'{path}': has {what} that '{self.dataset}' lacks ({summarize_names(map(str, unknown))})."
                    )
        model = self.cfg.MODEL
        fields = {
            "bbox": ("bbox", True),
            "segm": ("segmentation", model.MASK_ON),
            "keypoints": ("keypoints", model.KEYPOINT_ON),
        }
        tasks = [task for task, (key, wanted) in fields.items() if wanted and all(key in each for each in results)]
        sigmas = self.cfg.TEST.KEYPOINT_OKS_SIGMAS
        return Detections(metadata, {each["image_id"]: each for each in records}, truth, results, tasks, sigmas)

    @cached_property
    def matches(self) -> list[ImageMatches]:
        """The detections of every image, matched to its objects."""
        return self.detections.match(self.options.iou, self.options.score)


@contextlib.contextmanager
def needed(command: str = "") -> Iterator[None]:
    """Turn an error that the user can fix into a MissingInputError."""
    try:
        yield
    except Exception as error:
        if not is_user_error(error):
            raise
        reason = str(error).partition(" Fix: ")[0] if command else str(error)
        raise MissingInputError(reason, command) from error
