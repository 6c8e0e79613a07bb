"""Write predictions to a folder: COCO results and pictures."""

import json
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data import Metadata
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from PIL import Image

from ..atomic import atomic_folder, check_replaceable
from ..data.images import BROWSER_SUFFIXES
from ..errors import ConfigError, DataError, MissingFileError, OutputFolderError
from ..installation import require_packages
from ..progress import progress_bar
from .image_sources import ImageSource
from .predictors import Predictor
from .video import VideoReader, VideoWriter

RESULTS, IMAGES, PICTURES = "predictions.json", "images.json", "pictures"
_KEYS = (
    "image_id",
    "file_name",
    "frame",
    "category_id",
    "category_name",
    "score",
    "bbox",
    "keypoints",
    "segmentation",
)


@dataclass
class PredictionSummary:
    """Counts of a prediction.

    Args:
        output: the folder.
        images: number of images and frames.
        detections: number of objects in them.
        seconds: for reading, prediction and drawing.
        failed: source -> why it could not be read.
    """

    output: str
    images: int = 0
    detections: int = 0
    seconds: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)


def check_output(output: str | os.PathLike[str], sources: Iterable[ImageSource]) -> None:
    """Refuse an output folder that holds other files than earlier predictions.

    Raises:
        OutputFolderError: the folder holds other files.
        ConfigError: one of the sources is in the folder, which would be replaced.
    """
    folder = Path(output).resolve()
    check_replaceable(folder, (RESULTS, IMAGES, PICTURES))
    if (folder / PICTURES).exists() and not (folder / RESULTS).exists():
        raise OutputFolderError(
            f"output ('{output}'): holds '{PICTURES}' without {RESULTS}. Fix: give an empty or new folder."
        )
    for source in sources:
        if source.path.resolve().is_relative_to(folder):
            raise ConfigError(
                f"output ('{output}'): would replace the input '{source.path}'. Fix: give a folder without inputs."
            )


def write_predictions(
    predictor: Predictor,
    sources: Sequence[ImageSource],
    output: str | os.PathLike[str],
    *,
    pictures: bool = True,
) -> PredictionSummary:
    """Predict on images and videos, and write the folder ``output``, all of it or nothing.

    ``predictions.json`` is a list of COCO results, ``images.json`` lists images and categories as COCO annotation files
    do, and ``pictures`` holds images and videos with the objects drawn. Sources that cannot be read are left out.

    Args:
        predictor: the detector.
        sources: the images and videos.
        output: the folder to create. It may hold earlier predictions, which are replaced.
        pictures: whether to draw.

    Raises:
        DataError: none of the sources can be read.
        OutputFolderError: ``output`` holds other files.
        MissingPackageError: OpenCV is not installed, which drawing and videos need.
    """
    check_output(output, sources)
    if pictures:
        require_packages("pictures", "cv2")
    begin = time.perf_counter()
    summary = PredictionSummary(os.fspath(output))
    images: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    with (
        atomic_folder(output, (RESULTS, IMAGES, PICTURES)) as folder,
        progress_bar(desc="predicting", unit="image", total=sum(source.count() for source in sources)) as progress,
    ):
        names = {source.name for source in sources}
        for source in sources:
            try:
                path = folder / PICTURES / _picture_name(source, names)
                with _drawing(source, path, predictor.metadata, enabled=pictures) as draw:
                    for index, image in enumerate(source.images()):
                        found = predictor(image)
                        draw(image, found)
                        name = {"file_name": source.name, **({"frame": index} if source.is_video else {})}
                        height, width = image.shape[:2]
                        images.append({"id": len(images) + 1, **name, "height": height, "width": width})
                        results += [name | each for each in instances_to_coco_json(found, len(images))]
                        progress.update()
            except (DataError, MissingFileError) as error:
                summary.failed[source.name] = str(error)
        if not sources:
            raise DataError("sources: none. Fix: give images or videos, see find_sources.")
        if not images:
            first, reason = next(iter(summary.failed.items()))
            reason = reason.partition(" Fix: ")[0].removesuffix(".")
            raise DataError(
                f"inputs ({len(sources)}): none can be read; '{first}': {reason}. Fix: give images or videos."
            )
        _write_json(folder, predictor.metadata, images, results)
    summary.images, summary.detections = len(images), len(results)
    summary.seconds = round(time.perf_counter() - begin, 3)
    return summary


def _write_json(folder: Path, metadata: Metadata, images: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
    """Write images and results; class indices become the dataset's category ids, where they are known."""
    names = metadata.get("thing_classes", None)
    ids = {index: number for number, index in metadata.get("thing_dataset_id_to_contiguous_id", {}).items()}
    indices = sorted({each["category_id"] for each in results}) if names is None else range(len(names))
    categories = {
        index: {"id": ids.get(index, index), "name": names[index] if names else str(index)} for index in indices
    }
    rows = []
    for result in results:
        category = categories[result["category_id"]]
        named = result | {"category_id": category["id"], "category_name": category["name"]}
        rows.append(json.dumps({key: named[key] for key in _KEYS if key in named}))
    (folder / RESULTS).write_text("[" + ",".join(f"\n{row}" for row in rows) + "\n]\n")
    listed = {"images": images, "annotations": [], "categories": list(categories.values())}
    (folder / IMAGES).write_text(json.dumps(listed, indent=1) + "\n")


def _picture_name(source: ImageSource, names: Container[str]) -> str:
    """Return the name of the drawn picture or video: that of the source, with another end if the format needs it.

    ``names`` are those of all sources, which are not replaced.
    """
    name, end = source.name, ".mp4" if source.is_video else ".png"
    suffixes = (end,) if source.is_video else BROWSER_SUFFIXES
    if Path(name).suffix.lower() not in suffixes:
        name += end
        while name in names:
            name += end
    return name


@contextmanager
def _drawing(
    source: ImageSource, path: Path, metadata: Metadata, *, enabled: bool
) -> Iterator[Callable[[np.ndarray, Any], None]]:
    """Yield a function that draws objects on an image and appends it to the picture or video of a source."""
    if not enabled:
        yield lambda image, found: None
        return
    from .drawing import draw_predictions  # Detectron2's drawing needs OpenCV

    path.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_video:
        yield lambda image, found: Image.fromarray(draw_predictions(image, metadata, found)).save(path, quality=95)
        return
    with VideoWriter(path, VideoReader(source.path).frames_per_second) as writer:
        yield lambda image, found: writer.write(draw_predictions(image, metadata, found))
