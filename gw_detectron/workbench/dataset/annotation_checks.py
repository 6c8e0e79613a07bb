"""Check a COCO file in one pass over its records."""

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import CheckReport, DataError, printable, summarize_names
from . import faults as f
from .coco_content import (
    LARGEST_ID,
    RecordReader,
    complete_annotations,
    is_match_id,
    replaced_values,
)
from .faults import Fault, describe
from .shape_checks import DatasetNeeds, shape_faults

_IMAGE_FIELDS = {"id", "file_name", "height", "width"}
_LARGEST_BOX = 1e9  # pixels; pycocotools and torch cannot store any number
_LONGEST_NAME = 200
_Found = dict[Fault, list[Any]]


def check_coco(
    content: Any,
    needs: DatasetNeeds,
    report: CheckReport,
    *,
    is_filled_in: bool = False,
) -> None:
    """Add errors and warnings to a report that count the annotations with a fault.

    What :func:`complete_coco` repairs is checked only in a content that is not completed. Another format is a
    DataError.
    """
    found: _Found = defaultdict(list)
    reader = RecordReader()
    with reader.errors():
        images = _check_images(reader, content["images"], needs)
        categories = _check_categories(reader, content["categories"])
        # the official test images have no annotations
        annotations = (
            content["annotations"] if needs.training else content.get("annotations", [])
        )
        sound = _check_annotations(
            reader, annotations, (images, categories), needs, found
        )

        reader.record = "bbox or segmentation"
        if sound:
            for fault, flags in shape_faults(sound, images, needs).items():
                found[fault] += [sound[i]["id"] for i in np.flatnonzero(flags)]
        if not (needs.training or is_filled_in):
            _check_evaluated_fields({**content, "annotations": sound}, needs, found)

    describe(found, len(annotations), "annotations", report, "ids ")
    twins = [name for name, count in Counter(categories.values()).items() if count > 1]
    if twins:
        report.warnings.append(
            f"categories of one name ({summarize_names(twins)}) are two classes. Fix: rename or join them."
        )


def _check_images(
    reader: RecordReader, images: Sequence[dict], needs: DatasetNeeds
) -> dict[Any, dict]:
    """Return the images by id; raise DataError unless each has the fields that Detectron2 reads."""
    by_id: dict[Any, dict] = {}
    for image in reader.read(images):
        missing = _IMAGE_FIELDS - image.keys()
        if missing:
            listed = ", ".join(sorted(missing))
            raise DataError(f"image {image.get('id', '')}: has no {listed}")
        if not (image["height"] >= 1 and image["width"] >= 1):
            raise DataError(
                f"image {image['id']}: has no pixels: its width or height is not 1 or more"
            )
        size = (image["width"], image["height"])
        # where masks are pasted
        if needs.masks and not all(isinstance(side, int) for side in size):
            raise DataError(
                f"image {image['id']}: width and height {size} are not integers. Fix: write the size of the file."
            )
        os.fspath(image["file_name"])  # else a TypeError
        _check_id(image["id"], "image")
        if image["id"] in by_id:
            raise DataError("images: two have the same id")
        by_id[image["id"]] = image

    if not by_id:
        raise DataError("images: the list is empty")
    _check_kinds(by_id, "images")
    return by_id


def _check_id(number: Any, kind: str) -> None:
    if isinstance(number, str):
        return
    # not true of NaN
    if not (isinstance(number, (int, float)) and abs(number) <= LARGEST_ID):
        raise DataError(
            f"{kind} {number!s:.80}: the id is neither a text nor a number up to 2^53, and the evaluation cannot store "
            "others. Fix: number them from 1."
        )


def _check_kinds(ids: Iterable[Any], name: str) -> None:
    if len({isinstance(number, str) for number in ids}) > 1:
        raise DataError(
            f"{name}: some ids are numbers and some texts. Fix: number them from 1."
        )


def _check_categories(
    reader: RecordReader, categories: Sequence[dict]
) -> dict[Any, str]:
    """Return the names by id; raise DataError for a name that cannot be shown."""
    names = {}
    for category in reader.read(categories):
        number, name = category["id"], category["name"]
        _check_id(number, "category")

        if not isinstance(name, str):
            raise DataError(
                f"category {number}: name ({name!s:.80}) is not a string. Fix: put it in quotes."
            )

        # terminals obey control characters; surrogates cannot be written
        kinds = set(map(unicodedata.category, name))
        if kinds & {"Cc", "Cs"} or len(name) > _LONGEST_NAME or not name.strip():
            raise DataError(
                f"category {number}: name ('{printable(name[:80])}') is blank, or has control characters, or more than "
                f"{_LONGEST_NAME} characters. Fix: rename it."
            )
        names[number] = name
    _check_kinds(names, "categories")
    return names


def _check_annotations(
    reader: RecordReader,
    annotations: Sequence[dict],
    known: tuple[Mapping[Any, dict], Mapping[Any, str]],
    needs: DatasetNeeds,
    found: _Found,
) -> list[dict]:
    """Return the annotations whose fields can be used; add to the faults of others."""
    images, categories = known
    fields = needs.fields()
    sound = []

    for annotation in reader.read(annotations):
        fault = None
        if missing := fields - annotation.keys():
            fault = Fault(f"have no {', '.join(sorted(missing))}", "add it")
        elif annotation["image_id"] not in images:
            fault = f.UNKNOWN_IMAGE
        elif annotation["category_id"] not in categories:
            fault = f.UNKNOWN_CATEGORY
        elif not _is_box(annotation["bbox"]):
            fault = f.NO_NUMBERS
        elif annotation.get("iscrowd", 0) not in (0, 1):
            fault = f.NO_FLAG
        else:
            sound.append(annotation)
            if needs.keypoints:
                fault = _keypoint_fault(annotation, needs.keypoints)
        if fault is not None:
            found[fault].append(annotation.get("id"))
    return sound


def _is_box(box: Any) -> bool:
    return len(box) == 4 and all(abs(value) < _LARGEST_BOX for value in box)


def _keypoint_fault(annotation: dict[str, Any], count: int) -> Fault | None:
    keypoints = annotation["keypoints"]
    if len(keypoints) != 3 * count:
        return f.KEYPOINTS
    if annotation.get("iscrowd"):  # not trained on, not counted
        return None

    points = np.array(keypoints, float).reshape(-1, 3)
    labeled = points[points[:, 2] > 0, :2]
    corner, sides = np.split(np.array(annotation["bbox"], float), 2)
    distance = np.abs(labeled - corner - sides / 2)
    is_near = (distance <= sides).all(axis=1)  # within twice the box
    return f.KEYPOINTS_APART if 2 * is_near.sum() < len(labeled) else None


def _check_evaluated_fields(content: Any, needs: DatasetNeeds, found: _Found) -> None:
    """Find wrong fields that pycocotools reads, in a file that is evaluated as it is."""
    annotations = [row for row in content["annotations"] if not row["iscrowd"]]
    completed = complete_annotations({**content, "annotations": annotations})
    found[f.AREA] += replaced_values(annotations, completed, "area")
    if needs.keypoints:
        found[f.COUNTS] += replaced_values(annotations, completed, "num_keypoints")
    ids = [annotation["id"] for annotation in content["annotations"]]
    found[f.NO_ID] += [number for number in ids if not is_match_id(number)]
