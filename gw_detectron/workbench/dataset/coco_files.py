"""COCO files: read one, complete what small labeling tools leave out, split it, and derive one on demand."""

import codecs
import hashlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from ...atomic import atomic_write
from ...errors import DataError, summarize_names
from .geometry import mask_boxes, wrong_areas

#: key of a derived file: what was replaced in it, one sentence each
COMPLETED = "gw_detectron_completed"

# A content that these functions cannot use is left as it is: preflight names its fault.
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)


def read_json(path: str) -> Any:
    """Read a JSON file in UTF-8, local or remote."""
    with PathManager.open(path, "rb") as file:
        text = file.read()
    try:
        return json.loads(text.decode())
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: also a number of thousands of digits
        mark = " without a byte order mark" if text.startswith(codecs.BOM_UTF8) else ""
        raise DataError(
            f"'{path}': invalid JSON: {error}. Fix: give JSON in UTF-8{mark}, not compressed."
        ) from error


def is_match_id(number: Any) -> bool:
    """Return whether COCO's evaluation counts a match of an annotation with this id: for some others AP is 0."""
    return type(number) is int and number > 0


def complete_coco(content: Any, classes: Mapping[int, str] | None = None) -> Any:
    """Add the fields that pycocotools reads where annotations lack them, and replace those that are surely wrong.

    ``area`` is the mask's, else the box's, ``iscrowd`` 0 (also of null, which Detectron2 takes for 1) or that of
    ``ignore``, ``id`` from 1, ``num_keypoints`` counts the labeled ones, and without ``keypoints`` none is labeled.
    Replaced values are described under :data:`COMPLETED`. Of the run's ``classes``, names by id, a file without others
    gets those that it lacks. A complete content is returned as it is.
    """
    try:
        own = {each["id"]: each["name"] for each in content["categories"]}
        if classes and own.items() < classes.items():
            added = {number: name for number, name in classes.items() if number not in own}
            note = f"categories: no {summarize_names(added.values())}. The run's copy has them."
            categories = [
                *content["categories"],
                *({"id": number, "name": name} for number, name in added.items()),
            ]
            content = {
                **content,
                "categories": categories,
                COMPLETED: [*content.get(COMPLETED, ()), note],
            }
        annotations = content["annotations"]
        numbered = all(is_match_id(each.get("id")) for each in annotations)
        sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
        places = [sizes.get(each["image_id"], (0, 0)) for each in annotations]
        masks = mask_boxes([each.get("segmentation") for each in annotations], places)[1]
        boxes = (
            np.array([each["bbox"][2:] for each in annotations], float)
            .reshape(-1, 2)
            .prod(axis=1)
        )
        given = np.array([each.get("area") for each in annotations], float)
        if not np.isfinite(boxes).all():
            return content
        wrong = wrong_areas(given, boxes, masks) & [
            not each.get("iscrowd") for each in annotations
        ]
        areas = np.where(masks > 0, masks, boxes).tolist()
        points = max(
            (len(each["keypoints"]) for each in annotations if each.get("keypoints")), default=0
        )
        completed, replaced = [], {"area": 0, "num_keypoints": 0}
        for number, each in enumerate(annotations, start=1):
            right: dict[str, Any] = {} if numbered else {"id": number}
            if (
                each.get("ignore", 0) != 0
            ):  # Detectron2 refuses it; a crowd, too, is neither trained on nor counted
                right |= {
                    "ignore": 0,
                    "iscrowd": int(bool(each["ignore"] or each.get("iscrowd"))),
                }
            if wrong[number - 1]:
                right["area"] = areas[number - 1]
            if points:
                right["keypoints"] = each.get("keypoints") or [0] * points
                right["num_keypoints"] = sum(value > 0 for value in right["keypoints"][2::3])
            for key in replaced:
                replaced[key] += key in each and each[key] != right.get(key, each[key])
            completed.append(
                {
                    "area": areas[number - 1],
                    **each,
                    "iscrowd": each.get("iscrowd") or 0,
                    **right,
                }
            )
    except _MALFORMED:
        return content
    if completed == annotations:
        return content
    notes = [
        f"{count} of {len(annotations)} annotations have a wrong {key}. The run's copy takes it from the {source}."
        for (key, count), source in zip(
            replaced.items(), ("mask or bbox", "labeled keypoints"), strict=True
        )
        if count
    ]
    notes = [*content.get(COMPLETED, ()), *notes]
    return {**content, "annotations": completed, **({COMPLETED: notes} if notes else {})}


def coco_of_records(
    records: Sequence[dict], classes: Sequence[str] | None, *, evaluated: bool
) -> Any:
    """Describe the records of a dataset that is a Python function as a COCO file.

    Returns None if the records have no annotated sizes and boxes in pixels, e.g. for another task. DataError: a record
    lacks a field that an evaluation reads.
    """
    needed = {"file_name", "height", "width", "image_id"}
    if evaluated and classes is None:
        raise DataError("no class names. Fix: set thing_classes of its metadata.")
    content: dict[str, list] = {"images": [], "annotations": []}
    for number, record in enumerate(records):
        missing = needed - record.keys()
        if missing and evaluated:
            what = ", ".join(sorted(missing))
            raise DataError(
                f"record {number}: has no {what}, which the evaluation reads. Fix: add it to the records."
            )
        if missing - {"image_id"} or "annotations" not in record:
            return None
        image = {key: record[key] for key in ("file_name", "height", "width")} | {
            "id": record.get("image_id", number)
        }
        content["images"].append(image)
        for each in record["annotations"]:
            if each.get("bbox_mode") not in (BoxMode.XYWH_ABS, BoxMode.XYXY_ABS):
                return None
            box = list(each["bbox"])
            if each["bbox_mode"] == BoxMode.XYXY_ABS:  # BoxMode.convert would round to float32
                box[2:] = [end - start for start, end in zip(box, box[2:], strict=False)]
            places = {
                "id": len(content["annotations"]) + 1,
                "image_id": image["id"],
                "bbox": box,
            }
            content["annotations"].append({**each, **places})
    count = 1 + max((each["category_id"] for each in content["annotations"]), default=-1)
    names = classes if classes is not None else map(str, range(count))
    return complete_coco(
        {**content, "categories": [{"id": i, "name": name} for i, name in enumerate(names)]}
    )


def split_coco(content: Any, val_fraction: float) -> tuple[Any, Any]:
    """Split the images of a COCO file by the hashes of their file names into training and validation.

    A hash, as a number from 0 to 1, below ``val_fraction`` means validation. So an image stays on its side when others
    are added. Both parts have at least one image; fewer than two images are a DataError.
    """
    try:
        places = {image["id"]: _place(image["file_name"]) for image in content["images"]}
        images, annotations = content["images"], content["annotations"]
        owners = [
            places.get(each["image_id"], 1.0) for each in annotations
        ]  # unknown: the training names it
    except _MALFORMED:
        return content, content
    ranked = sorted(set(places.values()))
    if len(ranked) < 2:
        raise DataError(
            f"{len(ranked)} images cannot be split. Fix: give more images, or a second file (--val-json)."
        )
    border = min(max(val_fraction, ranked[1]), ranked[-1])
    train, val = (
        {
            **content,
            "images": [image for image in images if (places[image["id"]] < border) is side],
            "annotations": [
                a
                for a, place in zip(annotations, owners, strict=True)
                if (place < border) is side
            ],
        }
        for side in (False, True)
    )
    return train, val


def _place(file_name: str) -> float:
    return (
        int.from_bytes(hashlib.sha256(file_name.encode(errors="surrogatepass")).digest()[:6])
        / 2**48
    )


class DerivedFile(PathHandler):
    """Path handler of a completed COCO file, or of a part of its split.

    The file is written when it is first used as a local file. Opening the path before, as preflight does, writes
    nothing: a refused run leaves its output folder unchanged.

    Not a ``NativePathHandler``: iopath would then use it for all local files.
    """

    def __init__(self, path: str, source: str, content: Any) -> None:
        super().__init__()
        self._path = path
        self._source = source
        self._text = json.dumps(content)  # "" once it is written

    def _get_supported_prefixes(self) -> list[str]:
        return [self._path]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        if self._text:
            file = Path(self._path)
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as temporary:
                temporary.write_text(self._text)
            self._text = ""
            logging.getLogger(__name__).info("'%s': written from '%s'", file, self._source)
        return path

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        if not self._text:
            return open(path, mode, buffering, **kwargs)
        return io.BytesIO(self._text.encode()) if "b" in mode else io.StringIO(self._text)
