"""Draw the annotations of a dataset, to look at them before a training."""

import logging
import os
import statistics
from pathlib import Path
from typing import Any

from detectron2.data import Metadata
from PIL import Image

from ...atomic import atomic_folder, check_replaceable
from ...errors import ConfigError, DataError, existing_path
from ...installation import require_packages
from ..console import progress_bar
from ..dataset.coco_content import (
    category_names,
    complete_coco,
    content_to_records,
)
from ..dataset.layouts import is_layout, read_labels
from ..images import evenly_spread, not_read, read_image
from ..images.drawing import draw_record
from .results_folder import COUNTS, PICTURES, not_read_note, write_counts

log = logging.getLogger(__name__)

_FILES = (COUNTS, PICTURES)  # no folder lacks the first
_LONGEST_STEM = 200  # bytes of a file name that names a picture
_PERCENTILES = (0.5, 99.5)  # black and white of images with more than 8 bits


def write_preview(
    annotations: str, images: str, output: str | os.PathLike[str], limit: int = 50
) -> int:
    """Draw annotations of at most ``limit`` images; return the number of ``pictures``.

    They are of images that are evenly spread over ``annotations``, a file in COCO format, whose ``file_name`` is
    relative to the folder ``images``, or other labels, which may do without. ``counts.csv`` counts all objects that
    can be drawn. An earlier preview is replaced.
    """
    require_packages("pictures", "cv2")
    check_replaceable(Path(output), _FILES)
    labels_path = existing_path("--preview", annotations, os.path.exists)
    if images:
        images = existing_path(
            "RUN, with --preview the folder of images", images, os.path.isdir
        )
    elif not is_layout(labels_path):
        raise ConfigError(
            "RUN: not given. Fix: with --preview of a json, give the folder of images."
        )

    with atomic_folder(output, _FILES) as folder:
        try:
            labels = read_labels(labels_path, images)
            content = complete_coco(_drawable(labels.content))[0]
            names = category_names(content)
            records = content_to_records(content, labels.images)
            objects = [row for row in content["annotations"] if not row.get("iscrowd")]
            write_counts(
                folder / COUNTS, content["images"], content["categories"], objects
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"--preview ('{annotations}'): not a file in COCO format: {error!r}."
            ) from error

        (folder / PICTURES).mkdir()
        metadata = Metadata(thing_classes=[names[number] for number in sorted(names)])
        chosen = evenly_spread(records, limit)
        bar = progress_bar(chosen, desc="drawing", unit="image")
        for number, record in enumerate(bar, start=1):
            pixels = read_image(record["file_name"], "RGB", _PERCENTILES)
            stem = os.fsencode(Path(record["file_name"]).stem)[:_LONGEST_STEM]
            name = f"{number}_{os.fsdecode(stem)}.jpg"
            drawn = Image.fromarray(draw_record(pixels, metadata, record))
            drawn.save(folder / PICTURES / name, quality=95)
        files = [record["file_name"] for record in chosen]
        parts = {file: part for file in files if (part := not_read(file))}
        if parts:
            log.warning(not_read_note(parts))
    return len(chosen)


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
