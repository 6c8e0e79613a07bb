"""Draw the annotations of a dataset, to look at them before a training."""

import json
import logging
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from ...atomic import atomic_folder, check_replaceable
from ...errors import DataError, existing_path
from ...installation import require_packages
from ..console import progress_bar
from ..dataset.coco_content import complete_coco, read_json
from ..dataset.datasets_yaml import CocoDataset, CocoDatasets
from ..dataset.registration import register_datasets
from ..images import evenly_spread, read_image
from ..images.drawing import draw_record
from .results_folder import COUNTS, PICTURES, write_counts

log = logging.getLogger(__name__)

_FILES = (COUNTS, PICTURES)  # no folder lacks the first
_PREVIEW = "preview"  # name of the dataset
_PERCENTILES = (0.5, 99.5)  # black and white of images with more than 8 bits


def write_preview(
    annotations: str, images: str, output: str | os.PathLike[str], limit: int = 50
) -> int:
    """Draw annotations of at most ``limit`` images; return the number of ``pictures``.

    They are of images that are evenly spread over ``annotations``, a file in COCO format; its
    ``file_name`` is relative to the folder ``images``. ``counts.csv`` counts all objects that can
    be drawn. An earlier preview is replaced.
    """
    require_packages("pictures", "cv2")
    check_replaceable(Path(output), _FILES)
    json_file = existing_path("--preview", annotations, os.path.isfile)
    images = existing_path(
        "RUN, with --preview the folder of images", images, os.path.isdir
    )

    with tempfile.TemporaryDirectory() as work, atomic_folder(output, _FILES) as folder:
        try:
            content = complete_coco(_drawable(read_json(json_file)))[0]
            records = evenly_spread(_register(content, images, work), limit)
            objects = [row for row in content["annotations"] if not row.get("iscrowd")]
            write_counts(
                folder / COUNTS, content["images"], content["categories"], objects
            )
        except (
            AssertionError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # pycocotools'
            raise DataError(
                f"--preview ('{annotations}'): not a file in COCO format: {error!r}."
            ) from error

        (folder / PICTURES).mkdir()
        metadata = MetadataCatalog.get(_PREVIEW)
        bar = progress_bar(records, desc="drawing", unit="image")
        for number, record in enumerate(bar, start=1):
            pixels = read_image(record["file_name"], "RGB", _PERCENTILES)
            name = f"{number}_{Path(record['file_name']).stem}.jpg"
            drawn = Image.fromarray(draw_record(pixels, metadata, record))
            drawn.save(folder / PICTURES / name, quality=95)
    return len(records)


def _register(content: Any, images: str, folder: str) -> list[dict]:
    """Register the content of an annotation file as a dataset; return its records."""
    dataset = CocoDataset(os.path.join(folder, "annotations.json"), images)
    Path(dataset.json).write_text(json.dumps(content))
    register_datasets(CocoDatasets(val={_PREVIEW: dataset}), folder)
    return DatasetCatalog.get(_PREVIEW)


def _drawable(content: Any) -> Any:
    """Leave out annotations whose bbox or keypoints cannot be drawn."""
    given = content["annotations"]
    lengths = [len(row["keypoints"]) for row in given if row.get("keypoints")]
    usual = statistics.mode(lengths or [0])  # those of one image need equal lengths
    kept = [row for row in given if _has_box(row) and _has_points(row, usual)]

    if len(kept) < len(given):
        log.warning(
            f"--preview: {len(given) - len(kept)} of {len(given)} annotations left out: no bbox of "
            "four numbers, or keypoints of another length than most, or not three numbers for each."
        )
    return {**content, "annotations": kept}


def _has_box(annotation: dict[str, Any]) -> bool:
    box = annotation.get("bbox") or []
    is_number = [type(value) in (int, float) for value in box]
    return len(box) == 4 and all(is_number)


def _has_points(annotation: dict[str, Any], usual: int) -> bool:
    """Whether the keypoints have the usual length, three numbers for each, or there are none."""
    points = annotation.get("keypoints") or []
    return len(points) in (0, usual - usual % 3)
