"""Content of COCO files: read, complete, split, and convert to Detectron2's records.

A content that these functions cannot use is left as it is: the checks of the data name its fault.
"""

import codecs
import contextlib
import hashlib
import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager

from ...errors import DataError, kind_of_file, printable, summarize_names
from ...weights.fetching import refetch_hint
from .geometry import compressed, is_polygon, is_run_length, mask_boxes, wrong_areas

MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
LARGEST_ID = 2**53  # pycocotools stores the ids of matches as float64
_NO = ("", "no", "n", "false", "f", "none", "null", "nan")
_YES = ("yes", "y", "true", "t")
_RECORD_FIELDS = ("iscrowd", "bbox", "keypoints", "category_id")


class RecordReader:
    """Iterates over the records of a content, and remembers the one that an error is about."""

    def __init__(self) -> None:
        self.record: Any = "the lists images, annotations and categories"

    def read(self, records: Iterable[Any]) -> Iterator[Any]:
        for self.record in records:
            yield self.record

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turn an error of a malformed record into a DataError that shows it."""
        try:
            yield
        except DataError:
            raise
        except MALFORMED as error:
            shown = printable(f"{self.record!s:.80}")
            raise DataError(
                f"not in COCO format at {shown}: {type(error).__name__}: {error}. Fix: correct the file."
            ) from error


def read_json(path: str) -> Any:
    """Read a COCO file in UTF-8, local or remote; a JSON without a list of images is a DataError."""
    with PathManager.open(path, "rb") as file:
        text = file.read()
    try:
        content = json.loads(text.decode())
    # ValueError: also a number of thousands of digits
    except (ValueError, RecursionError) as error:
        reason = _json_problem(path, text, error)
        raise DataError(f"'{path}': {reason}{refetch_hint(path)}") from error

    keys = content if isinstance(content, dict) else {}
    if "images" not in keys:
        raise DataError(
            f"'{path}': not in COCO format: no list images (its keys: {summarize_names(keys) or 'none'}). Fix: export "
            "the labels as COCO, Pascal VOC or YOLO."
        )
    return content


def _json_problem(path: str, text: bytes, error: Exception) -> str:
    kind = kind_of_file(text[:1000])
    if kind:
        return f"not a json: {kind}."
    if not path.lower().endswith(".json"):
        return "not a json. Fix: give a COCO json, or labels of Pascal VOC or YOLO, or masks, as a folder."
    mark = " without a byte order mark" if text.startswith(codecs.BOM_UTF8) else ""
    return f"invalid JSON: {error}. Fix: give JSON in UTF-8{mark}, not compressed."


def category_names(content: Any) -> dict[int, str]:
    """Return the names of the categories by id, sorted by it; {} if the content is malformed."""
    try:
        names = {category["id"]: category["name"] for category in content["categories"]}
        return {number: names[number] for number in sorted(names)}
    except MALFORMED:
        return {}


def number_alike(content: Any, classes: Mapping[int, str]) -> Any:
    """Give categories the ids of ``classes`` by their names, if all names are among them."""
    numbers = {name: number for number, name in classes.items()}
    own = category_names(content)
    if own.items() <= classes.items() or not numbers.keys() >= {*own.values()}:
        return content
    categories = [{"id": numbers[name], "name": name} for name in own.values()]
    annotations = []
    for annotation in content["annotations"]:
        number = numbers[own[annotation["category_id"]]]
        annotations.append({**annotation, "category_id": number})
    return {**content, "categories": categories, "annotations": annotations}


def is_match_id(number: Any) -> bool:
    """Return whether COCO's evaluation counts a match of an annotation with this id."""
    return type(number) is int and 0 < number <= LARGEST_ID


def complete_coco(
    content: Any, classes: Mapping[int, str] | None = None
) -> tuple[Any, list[str]]:
    """Add the fields that pycocotools reads where annotations lack them; replace wrong values.

    ``area`` is the area of the mask, else of the box. ``iscrowd`` is 0 (also for null, NaN and texts such as "0",
    which Detectron2 takes for 1) or follows ``ignore``; the checks name another text. ``id`` counts from 1 where one is
    missing, repeated or unusable. ``num_keypoints`` counts the labeled ones; without ``keypoints`` none is labeled. A
    file with some of the ``classes`` of the run, names by id, gets the others. Sizes of images such as 640.0 become
    integers, as the pasting of masks needs them.

    Returns:
        The content, the same object if it is complete, and a sentence for each kind of replaced value.
    """
    try:
        with_classes, notes = _add_classes(_with_whole_sizes(content), classes or {})
        annotations = with_classes["annotations"]
        completed = complete_annotations(with_classes)
        # 1.0 equals 1, but is no id of a match
        has_ids = all(is_match_id(annotation.get("id")) for annotation in annotations)
        if has_ids and completed == annotations:
            return with_classes, notes
    except MALFORMED:
        return content, []

    sources = {"area": "mask or bbox", "num_keypoints": "labeled keypoints"}
    for field, source in sources.items():
        count = len(replaced_values(annotations, completed, field))
        if count:
            notes.append(
                f"{count} of {len(annotations)} annotations have a wrong {field}. The run's copy takes it from the "
                f"{source}."
            )
    return {**with_classes, "annotations": completed}, notes


def _with_whole_sizes(content: Any) -> Any:
    """Return a content whose sizes of images are integers where they are whole; the same object if all are."""
    images = []
    for image in content["images"]:
        whole = {
            side: int(image[side])
            for side in ("height", "width")
            if isinstance(image[side], float) and image[side].is_integer()
        }
        images.append(image | whole if whole else image)
    is_same = all(map(operator.is_, images, content["images"]))
    return content if is_same else {**content, "images": images}


def _add_classes(content: Any, classes: Mapping[int, str]) -> tuple[Any, list[str]]:
    own = category_names(content)
    if not own.items() < classes.items():
        return content, []

    missing = {number: name for number, name in classes.items() if number not in own}
    added = [{"id": number, "name": name} for number, name in missing.items()]
    names = summarize_names(missing.values())
    note = f"categories: no {names}. The run's copy has them."
    return {**content, "categories": [*content["categories"], *added]}, [note]


def complete_annotations(content: Any) -> list[dict[str, Any]]:
    """Return the annotations of a content with the fields that :func:`complete_coco` adds."""
    annotations = content["annotations"]
    areas, is_wrong = _areas(content)
    ids = [annotation.get("id") for annotation in annotations]
    has_ids = all(map(is_match_id, ids)) and len(set(ids)) == len(ids)
    lengths = [len(annotation.get("keypoints") or ()) for annotation in annotations]
    unlabeled = [0] * max(lengths, default=0)

    completed = []
    for index, annotation in enumerate(annotations):
        fields = {"area": areas[index], **annotation}
        fields["iscrowd"] = _is_set(annotation.get("iscrowd"))
        if not has_ids:
            fields["id"] = index + 1

        if annotation.get("ignore", 0) != 0:
            # Detectron2 refuses it; a crowd, too, is neither trained on nor counted
            fields["iscrowd"] = fields["iscrowd"] or _is_set(annotation["ignore"])
            fields["ignore"] = 0
        if is_wrong[index]:
            fields["area"] = areas[index]
        if unlabeled:
            keypoints = annotation.get("keypoints") or unlabeled
            labeled = [visibility > 0 for visibility in keypoints[2::3]]
            fields |= {"keypoints": keypoints, "num_keypoints": sum(labeled)}
        completed.append(fields)
    return completed


def _is_set(value: Any) -> Any:
    """Return 1 for a flag that is set, else 0; tools write it as a number, as true or as a text.

    A text that is neither is returned.
    """
    text = str(value or "").strip().lower()
    if text in (*_NO, *_YES):
        return int(text in _YES)
    try:
        return int(float(text) != 0)
    except ValueError:
        return value


def _areas(content: Any) -> tuple[list[float], np.ndarray]:
    """Return the area of each annotation's mask, else box, and whether the given one is wrong."""
    annotations = content["annotations"]
    sizes = {
        image["id"]: (image["height"], image["width"]) for image in content["images"]
    }
    owners = [sizes.get(annotation["image_id"], (0, 0)) for annotation in annotations]
    masks = mask_boxes([a.get("segmentation") for a in annotations], owners)[1]

    sides = np.array([annotation["bbox"][2:] for annotation in annotations], float)
    boxes = sides.reshape(-1, 2).prod(axis=1)
    if not np.isfinite(boxes).all():
        raise ValueError("bbox: not finite")

    given = np.array([_number(a.get("area")) for a in annotations], float)
    is_crowd = [bool(_is_set(annotation.get("iscrowd"))) for annotation in annotations]
    is_wrong = wrong_areas(given, boxes, masks) & ~np.array(is_crowd, bool)
    return np.where(masks > 0, masks, boxes).tolist(), is_wrong


def _number(value: Any) -> float:
    """Return a number as a float, NaN for anything else; a text is none, as for pycocotools."""
    is_number = isinstance(value, (int, float)) and abs(value) < 1e15
    return float(value) if is_number else np.nan


def replaced_values(
    annotations: Sequence[dict[str, Any]],
    completed: Sequence[dict[str, Any]],
    field: str,
) -> list[Any]:
    """Return the ids of annotations whose given value of a field was replaced."""
    return [
        given.get("id")
        for given, right in zip(annotations, completed, strict=True)
        if field in given and given[field] != right.get(field, given[field])
    ]


def split_coco(content: Any, val_fraction: float) -> tuple[Any, Any]:
    """Split the images of a COCO file by the hashes of their file names into training and validation.

    A hash, as a number from 0 to 1, below ``val_fraction`` means validation. So an image stays on its side when others
    are added. Both parts have at least one image; fewer than two images are a DataError.
    """
    try:
        places = {
            image["id"]: _place(image["file_name"]) for image in content["images"]
        }
        # an annotation of an unknown image stays in the training, whose check names it
        owners = [places.get(a["image_id"], 1.0) for a in content["annotations"]]
    except MALFORMED:
        return content, content

    ranked = sorted(set(places.values()))
    if len(ranked) < 2:
        raise DataError(
            f"images with {len(ranked)} different file names cannot be split. Fix: give more images, or a second file "
            "(--val-json)."
        )
    border = min(max(val_fraction, ranked[1]), ranked[-1])

    parts = []
    for side in (False, True):
        images = [i for i in content["images"] if (places[i["id"]] < border) is side]
        pairs = zip(content["annotations"], owners, strict=True)
        annotations = [a for a, place in pairs if (place < border) is side]
        parts.append({**content, "images": images, "annotations": annotations})
    return parts[0], parts[1]


def _place(file_name: str) -> float:
    """Return a number from 0 to 1 that follows from a file name."""
    digest = hashlib.sha256(file_name.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def content_to_records(content: Any, image_root: str) -> list[dict[str, Any]]:
    """Return Detectron2's records of a COCO content, as its ``load_coco_json`` reads them from a file.

    A mask that is not one of its image is left out. Another format is a DataError.
    Source: docs of Detectron2, "Use Custom Datasets". A second parse of a file of COCO's size takes a minute.
    """
    reader = RecordReader()
    with reader.errors():
        indices = {
            number: index for index, number in enumerate(category_names(content))
        }
        images = sorted(content["images"], key=lambda image: image["id"])
        records = {
            image["id"]: {
                "file_name": os.path.join(image_root, image["file_name"]),
                "height": image["height"],
                "width": image["width"],
                "image_id": image["id"],
                "annotations": [],
            }
            for image in reader.read(images)
        }

        # the official test images have none
        for annotation in reader.read(content.get("annotations", ())):
            owner = records.get(annotation["image_id"])
            if owner is None:
                continue
            record = _object_record(annotation, (owner["height"], owner["width"]))
            if record is not None:
                record["category_id"] = indices[annotation["category_id"]]
                owner["annotations"].append(record)
        return list(records.values())


def _object_record(
    annotation: dict[str, Any], size: tuple[int, int]
) -> dict[str, Any] | None:
    """Return the record of an object; None, as in Detectron2, if its polygons are all invalid."""
    record = {
        field: annotation[field] for field in _RECORD_FIELDS if field in annotation
    }
    record["bbox_mode"] = BoxMode.XYWH_ABS

    mask = annotation.get("segmentation")
    if mask and is_run_length(mask, size):
        record["segmentation"] = compressed(mask)
    elif isinstance(mask, list) and mask:
        polygons = [polygon for polygon in mask if is_polygon(polygon)]
        if not polygons:
            return None
        record["segmentation"] = polygons

    if annotation.get("keypoints"):
        # COCO's are pixel indices, Detectron2's are coordinates
        record["keypoints"] = [
            value if index % 3 == 2 else value + 0.5
            for index, value in enumerate(annotation["keypoints"])
        ]
    return record
