"""Find images and videos, predict on them, and write a folder of results."""

import csv
import glob
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data import Metadata
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
from ..images import BROWSER_SUFFIXES, find_images, open_image, read_image
from ..images.drawing import draw_predictions
from .predictor import Predictor
from .tiled_predictor import TiledPredictor, shrunk

log = logging.getLogger(__name__)

RESULTS = "predictions.json"
IMAGES = "images.json"
COUNTS = "counts.csv"
PICTURES = "pictures"
_FILES = (RESULTS, IMAGES, COUNTS, PICTURES)  # no folder lacks the first
_VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_FRAMES_PER_SECOND = 25.0  # of a video that does not tell
_Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class ImageSource:
    """An image or video file."""

    path: Path  # absolute
    name: str  # unique: the path relative to the folder that all sources share

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in _VIDEOS

    def images(
        self, percentiles: Sequence[float] = (), *, windows: bool = False
    ) -> Iterator[Any]:
        """Yield the image, or a video's frames, (H, W, 3) RGB uint8.

        An image is turned upright by its EXIF entry; gray values become RGB, transparency is
        dropped.

        Args:
            percentiles: ``INPUT.PERCENTILES``.
            windows: open an image by :func:`~gw_detectron.workbench.images.open_image`.
        """
        if self.is_video:
            yield from self._frames()
        elif windows:
            yield open_image(self.path, percentiles)
        else:
            yield read_image(self.path, "RGB", percentiles)

    def video(self) -> Any:
        require_packages(f"video ('{self.path}')", "cv2")
        import cv2

        return cv2.VideoCapture(str(self.path))

    def _frames(self) -> Iterator[np.ndarray]:
        capture = self.video()
        import cv2

        count = 0
        is_read, frame = capture.read()
        while is_read:
            count += 1
            yield np.ascontiguousarray(frame[:, :, ::-1])
            is_read, frame = capture.read()

        expected = capture.get(cv2.CAP_PROP_FRAME_COUNT)  # an estimate
        if count < max(1, 0.9 * expected):
            raise DataError(
                f"video ('{self.path}'): {count} of about {expected:.0f} frames can be read. Fix: "
                "repair it or give another one."
            )


def find_sources(inputs: Iterable[str | os.PathLike[str]]) -> list[ImageSource]:
    """Find the images and videos that files, folders and patterns such as ``photos/**/*.jpg`` name.

    A folder means the images below it; a file that is named twice is taken once. Those of a folder
    or pattern are sorted by path.
    """
    folders: list[str] = []
    paths: list[str] = []
    for given in inputs:
        if os.path.isdir(given):
            folders.append(os.path.abspath(given))
            paths += map(os.path.abspath, find_images(given))
        else:
            files = [os.path.abspath(path) for path in _find_files(os.fspath(given))]
            folders += map(os.path.dirname, files)
            paths += files

    if not folders:
        raise DataError(
            "inputs: none. Fix: give images, a folder, a pattern or a video."
        )
    shared = os.path.commonpath(folders)
    unique = dict.fromkeys(paths)
    return [ImageSource(Path(path), os.path.relpath(path, shared)) for path in unique]


def _find_files(given: str) -> list[str]:
    if os.path.isfile(given):  # its name may look like a pattern
        return [given]
    files = sorted(filter(os.path.isfile, glob.glob(given, recursive=True)))
    if not files:
        raise MissingFileError(
            f"input ('{given}'): not found (cwd: {os.getcwd()}). Fix: give images, a folder, a "
            "pattern or a video."
        )
    return files


@dataclass
class PredictionSummary:
    """Counts of a prediction."""

    output: str
    images: int = 0  # and frames
    detections: int = 0
    seconds: float = 0.0  # for reading, prediction and drawing
    failed: dict[str, str] = field(
        default_factory=dict
    )  # source -> why it was left out


def check_output(
    output: str | os.PathLike[str], sources: Iterable[ImageSource]
) -> None:
    """Refuse an output folder with other files than earlier predictions, or with a source."""
    folder = Path(output).resolve()
    check_replaceable(folder, _FILES)
    for source in sources:
        if source.path.resolve().is_relative_to(folder):
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
    partial = Path(f"{Path(output).resolve()}.partial")
    check_replaceable(partial, _FILES)
    if pictures:
        require_packages("pictures", "cv2")

    begin = time.perf_counter()
    summary = PredictionSummary(os.fspath(output))
    predictions = _Predictions(predictor.metadata)
    has_videos = any(source.is_video for source in sources)
    total = None if has_videos else len(sources)
    bar = progress_bar(desc="predicting", unit="image", total=total)
    with atomic_folder(output, _FILES) as folder, bar:
        names = {source.name for source in sources}
        try:
            for source in sources:
                picture = (
                    folder / PICTURES / _picture_name(source, names)
                    if pictures
                    else None
                )
                try:
                    for entry, instances in _predict(predictor, source, picture):
                        predictions.add(entry, instances)
                        bar.update()
                except Exception as error:
                    summary.failed[source.name] = _why_left_out(error)

            if not predictions.images:
                reason = next(iter(summary.failed.values()), "")  # of the first one
                raise DataError(
                    f"inputs ({len(sources)}): none can be predicted: {reason}"
                )
            predictions.write(folder)
        except BaseException:  # also Ctrl-C
            if predictions.images:
                predictions.write(folder)
                shutil.rmtree(partial, ignore_errors=True)
                os.rename(folder, partial)
                log.warning(
                    f"not complete; images done until now: {len(predictions.images)}, in "
                    f"'{partial}'."
                )
            raise

    summary.images = len(predictions.images)
    summary.detections = len(predictions.results)
    summary.seconds = round(time.perf_counter() - begin, 3)
    return summary


def _why_left_out(error: Exception) -> str:
    """Return why a source is left out; raise other errors again."""
    if isinstance(error, (DataError, MissingFileError)):
        return str(error)
    if is_out_of_memory(error):
        reason = f"out of memory: {first_line(error)}"
        return f"{reason}. Fix: give --tiles, smaller ones, or --device cpu."
    raise error


def _predict(
    predictor: Predictor | TiledPredictor, source: ImageSource, picture: Path | None
) -> Iterator[tuple[dict[str, Any], Instances]]:
    """Predict on the images of a source and draw them.

    Yields:
        the image's entry in ``images.json``, and its objects.
    """
    images = source.images(
        predictor.cfg.INPUT.PERCENTILES, windows=isinstance(predictor, TiledPredictor)
    )
    with closing(_Drawer(source, picture, predictor.metadata)) as drawer:
        for index, image in enumerate(images):
            instances = predictor(image)
            drawer.draw(image, instances)

            entry: dict[str, Any] = {"file_name": source.name}
            if source.is_video:
                entry["frame"] = index
            height, width, _ = image.shape
            yield {**entry, "height": height, "width": width}, instances


class _Predictions:
    """Rows of the files, with the dataset's category ids and names, where they are known."""

    def __init__(self, metadata: Metadata) -> None:
        self.images: _Rows = []
        self.results: _Rows = []
        numbers = metadata.get("thing_dataset_id_to_contiguous_id", {})
        ids = {index: number for number, index in numbers.items()}
        self._categories = {
            index: {"id": ids.get(index, index), "name": name}
            for index, name in enumerate(metadata.get("thing_classes", []))
        }

    def add(self, entry: dict[str, Any], instances: Instances) -> None:
        """Add an image, by its entry in ``images.json``, and its objects."""
        number = len(self.images) + 1
        self.images.append({"id": number, **entry})
        place = {
            key: value for key, value in entry.items() if key in ("file_name", "frame")
        }
        for result in _coco_results(instances, number):
            index = result.pop("category_id")
            unnamed = {"id": index, "name": str(index)}
            category = self._categories.setdefault(index, unnamed)
            self.results.append(
                {
                    "image_id": result.pop("image_id"),
                    **place,
                    "category_id": category["id"],
                    "category_name": category["name"],
                    **result,
                }
            )

    def write(self, folder: Path) -> None:
        categories = [self._categories[index] for index in sorted(self._categories)]
        write_counts(folder / COUNTS, self.images, categories, self.results)
        rows = [f"\n{json.dumps(result)}" for result in self.results]
        (folder / RESULTS).write_text(f"[{','.join(rows)}\n]\n")
        listed = {"images": self.images, "annotations": [], "categories": categories}
        (folder / IMAGES).write_text(json.dumps(listed, indent=1) + "\n")


def _coco_results(instances: Instances, image_id: int) -> _Rows:
    results = instances_to_coco_json(instances, image_id)
    if instances.has("pred_masks_rle"):  # of tiles
        for result, rle in zip(results, instances.pred_masks_rle, strict=True):
            result["segmentation"] = rle | {"counts": rle["counts"].decode()}
    return results


def write_counts(path: Path, images: _Rows, categories: _Rows, objects: _Rows) -> None:
    """Write the number of objects of each class in each image, in COCO's format, as a csv file."""
    counts = Counter((row["image_id"], row["category_id"]) for row in objects)
    keys = ["file_name"]
    if any("frame" in image for image in images):
        keys.append("frame")

    names = [category["name"] for category in categories]

    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*keys, *names, "all"])
        for image in images:
            place = [image.get(key, "") for key in keys]
            numbers = [counts[image["id"], category["id"]] for category in categories]
            writer.writerow([*place, *numbers, sum(numbers)])


def _picture_name(source: ImageSource, names: Collection[str]) -> str:
    """Return the name of a drawn picture or video.

    Browsers show it. A name with an appended suffix is not in ``names``, those of other sources.
    """
    end = ".mp4" if source.is_video else ".png"
    kept = (end,) if source.is_video else BROWSER_SUFFIXES
    if source.name.lower().endswith(kept):
        return source.name

    name = source.name + end
    while name in names:
        name += end
    return name


class _Drawer:
    """Draw the objects of a source, and write the picture or an mp4 file.

    A video has the size of its first frame. Without a path, nothing is drawn.
    """

    def __init__(
        self, source: ImageSource, path: Path | None, metadata: Metadata
    ) -> None:
        self.source = source
        self.path = path
        self.metadata = metadata
        self.video: Any = None

    def draw(self, image: Any, instances: Instances) -> None:
        if self.path is None:
            return

        self.path.parent.mkdir(parents=True, exist_ok=True)
        small, shown = shrunk(image, instances)
        drawn = draw_predictions(small, self.metadata, shown)
        if not self.source.is_video:
            Image.fromarray(drawn).save(self.path, quality=95)
            return
        if self.video is None:
            self.video = self._open_video(self.path, drawn.shape[1::-1])
        bgr = drawn[:, :, ::-1]
        self.video.write(np.ascontiguousarray(bgr))

    def _open_video(self, path: Path, size: Sequence[int]) -> Any:
        import cv2

        rate = self.source.video().get(cv2.CAP_PROP_FPS) or _FRAMES_PER_SECOND
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        video = cv2.VideoWriter(str(path), codec, rate, size)
        if not video.isOpened():
            raise FileAccessError(
                f"video ('{path.name}'): OpenCV cannot write mp4. Fix: use --no-pictures."
            )
        return video

    def close(self) -> None:
        if self.video is not None:
            self.video.release()
