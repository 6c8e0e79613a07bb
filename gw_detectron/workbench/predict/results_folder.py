"""Predict on images and videos, and write a folder of results."""

import csv
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from PIL import Image

from ...atomic import atomic_folder, check_replaceable
from ...errors import (
    ConfigError,
    DataError,
    MissingFileError,
    first_line,
    is_out_of_memory,
    printable,
    summarize_names,
)
from ...installation import require_packages
from ..console import progress_bar
from ..dataset.metadata import classes_of
from ..images import evaluation_sides, not_read
from .pictures import Drawer, picture_name
from .predictor import Predictor
from .sources import ImageSource
from .tiled_predictor import TiledPredictor

log = logging.getLogger(__name__)

RESULTS = "predictions.json"
IMAGES = "images.json"
COUNTS = "counts.csv"
PICTURES = "pictures"
_FILES = (RESULTS, IMAGES, COUNTS, PICTURES)  # no folder lacks the first
_FORMULA = ("=", "+", "-", "@")  # first characters, to spreadsheets
# share of the training's scale below which an image is named
_SMALL_SCALE = 0.5
_USUAL_TILE = 1024  # of a model that resizes no image
_Rows = list[dict[str, Any]]


@dataclass
class PredictionSummary:
    """Counts of a prediction."""

    images: int = 0  # and frames
    detections: int = 0
    seconds: float = 0.0  # for reading, prediction and drawing
    #: source -> why it was left out
    failed: dict[str, str] = field(default_factory=dict)
    #: sources that the model sees at less than half of the training images' scale
    shrunk: list[str] = field(default_factory=list)
    #: sources in which the model found as many objects as it gives
    full: list[str] = field(default_factory=list)
    #: source -> its pages or bits that are not read
    not_read: dict[str, str] = field(default_factory=dict)


def check_output(
    output: str | os.PathLike[str], sources: Iterable[ImageSource]
) -> None:
    """Refuse an output folder with other files than earlier predictions, or with a source."""
    folder = Path(os.path.realpath(output))
    check_replaceable(folder, _FILES)
    for source in sources:
        if Path(os.path.realpath(source.path)).is_relative_to(folder):
            raise ConfigError(
                f"output ('{output}'): would replace the input '{source.path}'. Fix: give another "
                "folder."
            )


def write_predictions(
    predictor: Predictor | TiledPredictor,
    sources: Sequence[ImageSource],
    output: str | os.PathLike[str],
    *,
    pictures: bool = True,
) -> PredictionSummary:
    """Predict on images and videos, and write the folder ``output``.

    ``predictions.json`` is a list of COCO results, ``images.json`` lists images and categories as
    COCO annotation files do, ``counts.csv`` counts objects, and ``pictures`` holds images and
    videos with the objects drawn. Sources that cannot be read or need too much memory are left
    out. After another error or Ctrl-C, ``output`` is unchanged, and the folder
    ``<output>.partial`` holds what was done. Earlier predictions are replaced.
    """
    check_output(output, sources)
    partial = Path(f"{os.path.realpath(output)}.partial")
    check_replaceable(partial, _FILES)
    if pictures:
        require_packages("pictures", "cv2")

    begin = time.perf_counter()
    run = _Prediction(predictor, sources)
    with atomic_folder(output, _FILES) as folder:
        try:
            run.predict(folder / PICTURES if pictures else None)
            run.write(folder)
        except BaseException:  # also Ctrl-C
            if run.images:
                _keep(run, folder, partial)
            raise

    run.summary.seconds = round(time.perf_counter() - begin, 3)
    return run.summary


def _keep(run: "_Prediction", folder: Path, partial: Path) -> None:
    """Move what was done to the folder of partial results; without pictures if the disk is full."""
    try:
        run.write(folder)
    except OSError:
        shutil.rmtree(folder / PICTURES, ignore_errors=True)
        run.write(folder)
    except Exception:  # the results are written first, and complete
        log.debug("'%s': not all files were written", partial, exc_info=True)

    shutil.rmtree(partial, ignore_errors=True)
    os.rename(folder, partial)
    log.warning(
        f"not complete; images done until now: {len(run.images)}, in '{partial}'."
    )


def usual_tile(predictor: Predictor | TiledPredictor) -> int:
    """Return a side of tiles in pixels: at the scale of the training images, else as large as the model sees."""
    seen = predictor.cfg.INPUT.MIN_SIZE_TEST or _USUAL_TILE
    return max(1, round(seen / (predictor.image_scale or 1)))


class _Prediction:
    """Images and objects until now, with the dataset's category ids and names."""

    def __init__(
        self, predictor: Predictor | TiledPredictor, sources: Sequence[ImageSource]
    ) -> None:
        self.predictor = predictor
        self.sources = sources
        self.is_tiled = isinstance(predictor, TiledPredictor)
        self.summary = PredictionSummary()
        self.images: _Rows = []
        self.results: _Rows = []
        classes = classes_of(predictor.metadata)
        self.categories = {
            index: {"id": number, "name": name}
            for index, (number, name) in enumerate(classes.items())
        }

    def predict(self, pictures: Path | None) -> None:
        """Predict on all sources that can be read; draw them in a folder if one is given."""
        names = {source.name for source in self.sources}
        has_videos = any(source.is_video for source in self.sources)
        total = None if has_videos else len(self.sources)
        bar = progress_bar(desc="predicting", unit="image", total=total)
        with bar:
            for number, source in enumerate(self.sources):
                picture = None
                if pictures is not None:
                    picture = pictures / picture_name(source, names, number)
                try:
                    for _ in self._predict(source, picture):
                        bar.update()
                except Exception as error:
                    self.summary.failed[source.name] = self._why_left_out(error)

        if not self.images:
            reason = next(iter(self.summary.failed.values()), "")  # of the first one
            raise DataError(
                f"inputs ({len(self.sources)}): none can be predicted: {reason}"
            )

    def _predict(self, source: ImageSource, picture: Path | None) -> Iterator[None]:
        """Predict on one image after the other of a source, and draw them."""
        images = source.images(
            self.predictor.cfg.INPUT.PERCENTILES, windows=self.is_tiled
        )
        with closing(Drawer(source, picture, self.predictor.metadata)) as drawer:
            for index, image in enumerate(images):
                rest = "" if source.is_video else not_read(source.path)
                if rest:
                    self.summary.not_read[source.name] = rest
                instances = self.predictor(image)
                drawer.draw(image, instances)
                self._add(source, index, instances)
                yield

    def _add(self, source: ImageSource, index: int, instances: Instances) -> None:
        """Add an image and its objects."""
        number = len(self.images) + 1
        height, width = instances.image_size
        place: dict[str, Any] = {"file_name": source.name}
        if source.is_video:
            place["frame"] = index
        self.images.append({"id": number, **place, "height": height, "width": width})

        if not index and self._is_shrunk(height, width):
            self.summary.shrunk.append(source.name)
        if self.predictor.is_full and source.name not in self.summary.full:
            self.summary.full.append(source.name)

        for result in _coco_results(instances, number):
            class_index = result["category_id"]
            unnamed = {"id": class_index, "name": str(class_index)}
            category = self.categories.setdefault(class_index, unnamed)
            result["category_id"] = category["id"]
            result["category_name"] = category["name"]
            self.results.append(result | place)

    def _is_shrunk(self, height: int, width: int) -> bool:
        """Return whether an image is shrunk much more than in training."""
        seen, _ = evaluation_sides(height, width, self.predictor.cfg)
        is_small = seen / height < _SMALL_SCALE * self.predictor.image_scale
        return is_small and seen < height and not self.is_tiled

    def _why_left_out(self, error: Exception) -> str:
        """Return why a source is left out; raise other errors again."""
        if isinstance(error.__cause__, Image.DecompressionBombError):
            return f"more than 179 megapixels. Fix: give --tiles {usual_tile(self.predictor)}, or shrink it."
        if isinstance(error, (DataError, MissingFileError)):
            return str(error)
        if is_out_of_memory(error):
            reason = f"out of memory: {first_line(error)}"
            return f"{reason}. Fix: give --tiles, smaller ones, or --device cpu."
        raise error

    def write(self, folder: Path) -> None:
        categories = [self.categories[index] for index in sorted(self.categories)]
        rows = [f"\n{json.dumps(result)}" for result in self.results]
        (folder / RESULTS).write_text(f"[{','.join(rows)}\n]\n")
        listed = {
            "info": {},
            "images": self.images,
            "annotations": [],
            "categories": categories,
        }
        (folder / IMAGES).write_text(json.dumps(listed, indent=1) + "\n")
        write_counts(folder / COUNTS, self.images, categories, self.results)
        self.summary.images = len(self.images)
        self.summary.detections = len(self.results)


def _coco_results(instances: Instances, image_id: int) -> _Rows:
    results = instances_to_coco_json(instances, image_id)
    if instances.has("pred_masks_rle"):  # of tiles
        for result, rle in zip(results, instances.pred_masks_rle, strict=True):
            result["segmentation"] = rle | {"counts": rle["counts"].decode()}
    return results


def not_read_note(parts: Mapping[str, str]) -> str:
    """Count image files and name their pages or bits that are not read."""
    names = summarize_names(f"{name} ({part})" for name, part in parts.items())
    return f"{len(parts)} images are not read whole; not read: {names}. Fix: save each part as an image of 8 bits."


def write_counts(path: Path, images: _Rows, categories: _Rows, objects: _Rows) -> None:
    """Write the number of objects of each class in each image, in COCO's format, as a csv file."""
    counts = Counter((row["image_id"], row["category_id"]) for row in objects)
    keys = ["file_name"]
    if any("frame" in image for image in images):
        keys.append("frame")
    names = [_cell(category["name"]) for category in categories]

    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*keys, *names, "all"])
        for image in images:
            place = [_cell(image.get(key, "")) for key in keys]
            numbers = [counts[image["id"], category["id"]] for category in categories]
            writer.writerow([*place, *numbers, sum(numbers)])


def _cell(value: Any) -> Any:
    """Escape a text, and mark it with ' if a spreadsheet would compute it."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
