"""Write predictions, or a preview of annotations, to a folder: COCO results and pictures."""

import csv
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from PIL import Image

from ...atomic import atomic_folder, check_replaceable
from ...errors import (
    ConfigError,
    DataError,
    FileAccessError,
    MissingFileError,
    first_line,
    is_out_of_memory,
)
from ...installation import require_packages
from ..console import progress_bar
from ..dataset.coco_content import complete_coco, read_json
from ..dataset.datasets_yaml import existing_path
from ..dataset.source import CocoDataset, CocoDatasets, register_datasets
from ..images.drawing import draw_predictions, draw_record
from ..images.reading import BROWSER_SUFFIXES, evenly_spread, read_image
from .image_sources import ImageSource
from .open_predictor import Predictor
from .tiles import TiledPredictor, shrunk

log = logging.getLogger(__name__)

RESULTS, IMAGES, COUNTS, PICTURES = "predictions.json", "images.json", "counts.csv", "pictures"
_FILES, _PREVIEW_FILES = (
    (RESULTS, IMAGES, COUNTS, PICTURES),
    (COUNTS, PICTURES),
)  # no folder lacks the first
_KEYS = [
    "image_id",
    "file_name",
    "frame",
    "category_id",
    "category_name",
    "score",
    "bbox",
    "keypoints",
    "segmentation",
]
_FRAMES_PER_SECOND = 25.0  # of a video that does not tell
_PREVIEW = "preview"
_Rows = list[dict[str, Any]]
_PERCENTILES = (0.5, 99.5)  # black and white of a preview's images with more than 8 bits


@dataclass
class PredictionSummary:
    """Counts of a prediction."""

    output: str
    images: int = 0  # and frames
    detections: int = 0
    seconds: float = 0.0  # for reading, prediction and drawing
    failed: dict[str, str] = field(default_factory=dict)  # source -> why it was left out


def check_output(output: str | os.PathLike[str], sources: Iterable[ImageSource]) -> None:
    """Refuse an output folder that holds other files than earlier predictions, or one of the sources."""
    folder = Path(output).resolve()
    check_replaceable(folder, _FILES)
    if inside := [
        source.path for source in sources if source.path.resolve().is_relative_to(folder)
    ]:
        raise ConfigError(
            f"output ('{output}'): would replace the input '{inside[0]}'. Fix: give another folder."
        )


def write_predictions(
    predictor: Predictor | TiledPredictor,
    sources: Sequence[ImageSource],
    output: str | os.PathLike[str],
    *,
    pictures: bool = True,
) -> PredictionSummary:
    """Predict on images and videos, and write the folder ``output``.

    ``predictions.json`` is a list of COCO results, ``images.json`` lists images and categories as COCO annotation files
    do, ``counts.csv`` counts objects, and ``pictures`` holds images and videos with the objects drawn. Sources that
    cannot be read or need too much memory are left out. After another error or Ctrl-C, ``output`` is unchanged, and the
    folder ``<output>.partial`` holds what was done. Earlier predictions are replaced.
    """
    check_output(output, sources)
    partial = Path(f"{Path(output).resolve()}.partial")
    check_replaceable(partial, _FILES)
    if pictures:
        require_packages("pictures", "cv2")
    begin = time.perf_counter()
    summary, videos = (
        PredictionSummary(os.fspath(output)),
        any(source.is_video for source in sources),
    )
    images: _Rows = []
    results: _Rows = []
    with (
        atomic_folder(output, _FILES) as folder,
        progress_bar(
            desc="predicting", unit="image", total=None if videos else len(sources)
        ) as progress,
    ):
        names = {source.name for source in sources}
        try:
            for source in sources:
                picture = folder / PICTURES / _picture_name(source, names) if pictures else None
                try:
                    for entry, found in _predict(predictor, source, picture):
                        rows = _coco_results(found, len(images) + 1)
                        images.append({"id": len(images) + 1, **entry})
                        results += [entry | each for each in rows]
                        progress.update()
                except (DataError, MissingFileError) as error:
                    summary.failed[source.name] = str(error)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = f"out of memory: {first_line(error)}. Fix: give --tiles, smaller ones, or --device cpu."
                    summary.failed[source.name] = reason
            if not images:
                reason = next(iter(summary.failed.values()), "")  # of the first one
                raise DataError(f"inputs ({len(sources)}): none can be predicted: {reason}")
            _write_json(folder, predictor.metadata, images, results)
        except BaseException:  # also Ctrl-C
            if images:
                _write_json(folder, predictor.metadata, images, results)
                shutil.rmtree(partial, ignore_errors=True)
                os.rename(folder, partial)
                log.warning(
                    f"not complete; images done until now: {len(images)}, in '{partial}'."
                )
            raise
    summary.images, summary.detections = len(images), len(results)
    summary.seconds = round(time.perf_counter() - begin, 3)
    return summary


def _predict(
    predictor: Predictor | TiledPredictor, source: ImageSource, picture: Path | None
) -> Iterator[tuple[dict[str, Any], Instances]]:
    """Predict on the images of a source and draw them; yield their entries in ``images.json`` and their objects."""
    windows, percentiles = (
        isinstance(predictor, TiledPredictor),
        predictor.cfg.INPUT.PERCENTILES,
    )
    with (
        closing(_Drawer(source, picture, predictor.metadata))
        if picture
        else nullcontext() as drawer
    ):
        for index, image in enumerate(source.images(percentiles, windows=windows)):
            found = predictor(image)
            if drawer is not None:
                drawer.draw(image, found)
            name = {"file_name": source.name, **({"frame": index} if source.is_video else {})}
            yield {**name, "height": image.shape[0], "width": image.shape[1]}, found


def _coco_results(found: Instances, image_id: int) -> _Rows:
    results = instances_to_coco_json(found, image_id)
    if found.has("pred_masks_rle"):  # of tiles
        for result, rle in zip(results, found.pred_masks_rle, strict=True):
            result["segmentation"] = rle | {"counts": rle["counts"].decode()}
    return results


def write_preview(
    annotations: str, images: str, output: str | os.PathLike[str], limit: int = 50
) -> int:
    """Draw annotations, to look at them before a training; return the number of ``pictures``.

    They are of images that are evenly spread over ``annotations``, a file in COCO format; its ``file_name`` is relative
    to the folder ``images``. ``counts.csv`` counts all objects that can be drawn. An earlier preview is replaced.
    """
    require_packages("pictures", "cv2")
    check_replaceable(Path(output), _PREVIEW_FILES)
    json_file = existing_path(annotations, "--preview", os.path.isfile)
    images = existing_path(images, "MODEL", os.path.isdir)
    with tempfile.TemporaryDirectory() as work, atomic_folder(output, _PREVIEW_FILES) as folder:
        dataset = CocoDataset(os.path.join(work, "annotations.json"), images)
        try:
            content = complete_coco(_drawable(read_json(json_file)))[0]
            Path(dataset.json).write_text(json.dumps(content))
            register_datasets(CocoDatasets(val={_PREVIEW: dataset}), work)
            records = evenly_spread(DatasetCatalog.get(_PREVIEW), limit)
            objects = [each for each in content["annotations"] if not each.get("iscrowd")]
            _write_counts(folder / COUNTS, content["images"], content["categories"], objects)
        except (
            AssertionError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # of pycocotools
            raise DataError(
                f"--preview ('{annotations}'): not a file in COCO format: {error!r}."
            ) from error
        (folder / PICTURES).mkdir()
        for number, record in enumerate(
            progress_bar(records, desc="drawing", unit="image"), start=1
        ):
            pixels = read_image(record["file_name"], "RGB", _PERCENTILES)
            drawn = Image.fromarray(draw_record(pixels, MetadataCatalog.get(_PREVIEW), record))
            drawn.save(
                folder / PICTURES / f"{number}_{Path(record['file_name']).stem}.jpg", quality=95
            )
    return len(records)


def _drawable(content: Any) -> Any:
    """Leave out annotations whose bbox or keypoints cannot be drawn; those of one image need equal lengths."""
    given = content["annotations"]
    points = statistics.mode(
        [len(each["keypoints"]) for each in given if each.get("keypoints")] or [0]
    )
    kept = [
        each
        for each in given
        if [type(value) in (int, float) for value in each.get("bbox") or ()] == 4 * [True]
    ]
    kept = [
        each for each in kept if len(each.get("keypoints") or ()) in (0, points - points % 3)
    ]
    if lost := len(given) - len(kept):
        reason = "no bbox of four numbers, or keypoints of another length than most, or not three numbers for each"
        log.warning(f"--preview: {lost} of {len(given)} annotations left out: {reason}.")
    return {**content, "annotations": kept}


def _write_json(folder: Path, metadata: Metadata, images: _Rows, results: _Rows) -> None:
    """Write images and results; class indices become the dataset's category ids, where they are known."""
    names = metadata.get("thing_classes", None)
    ids = {
        index: number
        for number, index in metadata.get("thing_dataset_id_to_contiguous_id", {}).items()
    }
    indices = (
        sorted({each["category_id"] for each in results})
        if names is None
        else range(len(names))
    )
    categories = {
        index: {"id": ids.get(index, index), "name": names[index] if names else str(index)}
        for index in indices
    }
    keys = {
        index: {"category_id": each["id"], "category_name": each["name"]}
        for index, each in categories.items()
    }
    results = [each | keys[each["category_id"]] for each in results]
    rows = [json.dumps({key: each[key] for key in _KEYS if key in each}) for each in results]
    _write_counts(folder / COUNTS, images, list(categories.values()), results)
    (folder / RESULTS).write_text("[" + ",".join(f"\n{row}" for row in rows) + "\n]\n")
    listed = {"images": images, "annotations": [], "categories": list(categories.values())}
    (folder / IMAGES).write_text(json.dumps(listed, indent=1) + "\n")


def _write_counts(path: Path, images: _Rows, categories: _Rows, objects: _Rows) -> None:
    """Write the number of objects of each class in each image, given in COCO's format, as a csv file."""
    counts = Counter((each["image_id"], each["category_id"]) for each in objects)
    keys = [key for key in ("file_name", "frame") if any(key in image for image in images)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*keys, *(category["name"] for category in categories), "all"])
        for image in images:
            found = [counts[image["id"], category["id"]] for category in categories]
            writer.writerow([*(image.get(key, "") for key in keys), *found, sum(found)])


def _picture_name(source: ImageSource, names: Container[str]) -> str:
    """Return the name of a drawn picture or video; one with an appended suffix is not in ``names``."""
    name, end = source.name, ".mp4" if source.is_video else ".png"
    if not name.lower().endswith(end if source.is_video else BROWSER_SUFFIXES):
        name += end
        while name in names:
            name += end
    return name


class _Drawer:
    """Draw objects on the images of a source, and write the picture or, with the first frame's size, an mp4 file."""

    def __init__(self, source: ImageSource, path: Path, metadata: Metadata) -> None:
        self.source, self.path, self.metadata = source, path, metadata
        self.video: Any = None
        path.parent.mkdir(parents=True, exist_ok=True)

    def draw(self, image: Any, found: Instances) -> None:
        small, found = shrunk(image, found)
        drawn = draw_predictions(small, self.metadata, found)
        if not self.source.is_video:
            Image.fromarray(drawn).save(self.path, quality=95)
            return
        import cv2

        if self.video is None:
            rate = self.source.video().get(cv2.CAP_PROP_FPS) or _FRAMES_PER_SECOND
            self.video = cv2.VideoWriter(
                str(self.path), cv2.VideoWriter.fourcc(*"mp4v"), rate, drawn.shape[1::-1]
            )
            if not self.video.isOpened():
                raise FileAccessError(
                    f"video ('{self.path.name}'): OpenCV cannot write mp4. Fix: use --no-pictures."
                )
        self.video.write(np.ascontiguousarray(drawn[:, :, ::-1]))

    def close(self) -> None:
        if self.video is not None:
            self.video.release()
