"""Whether the files of a registered data set are there and its COCO json has the fields that are read."""

import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager


def check_dataset(name: str, problems: list[str], *, for_training: bool, masks: bool) -> list[str] | None:
    """Adds what is wrong with a data set to ``problems``.

    Args:
        name: the name in Detectron2's ``DatasetCatalog``.
        problems: the list to add to; each entry names file, field and record, and what to do.
        for_training: False for a data set to evaluate on, which needs more fields but may have no annotations.
        masks: annotations need a segmentation.

    Returns:
        The class names in the order of their ids, or None if they are not known.
    """
    if name not in DatasetCatalog:
        near = difflib.get_close_matches(name, list(DatasetCatalog), n=3)
        hint = f" Near it are {', '.join(near)}." if near else " Register it first."
        problems.append(f"There is no data set {name}.{hint}")
        return None
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    if json_file is None:  # a data set from the user's own function
        return metadata.get("thing_classes")
    where = f"Data set {name}: {json_file}"
    try:
        path = PathManager.get_local_path(json_file)  # makes or fetches it where there is a handler for it
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        problems.append(f"Data set {name}: {_missing(json_file)} {_where_to_look(json_file)}")
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{where} is not json: {error}. Get the file again.")
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{where} cannot be read: {error}. Put the annotations there, as a file.")
        return None
    try:
        _check_content(content, for_training=for_training, masks=masks)
    except ValueError as error:
        problems.append(f"{where}: {error}. Correct the file.")
        return None
    image_root = metadata.get("image_root")
    if image_root is not None:
        _check_images(name, image_root, [image["file_name"] for image in content["images"]], problems)
    return [category["name"] for category in sorted(content["categories"], key=lambda category: category["id"])]


def _missing(path: str) -> str:
    """Names the outermost part of a path that is missing."""
    gone = Path(path)
    while not gone.parent.exists():
        gone = gone.parent
    return f"there is no {gone}" + ("." if str(gone) == str(path) else f", so no {path}.")


def _where_to_look(path: str) -> str:
    variable = os.environ.get("DETECTRON2_DATASETS")
    now = f"it is {variable}" if variable else "it is not set, which means datasets"
    if Path(path).is_absolute() and not variable:
        return "Put it there, or register the data set with another path."
    return f"Set the environment variable DETECTRON2_DATASETS to the folder that holds the data sets (now {now})."


def _check_content(content: Any, *, for_training: bool, masks: bool) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, not an object with images, annotations and categories")
    needed = ["images", "categories"]
    if for_training or "annotations" in content:  # the official test images come without annotations
        needed.append("annotations")
    for key in needed:
        if not isinstance(content.get(key), list):
            raise ValueError(f"it has no list '{key}'")
    _check_fields("categories", content["categories"], ("id", "name"))
    _check_fields("images", content["images"], ("id", "file_name", "height", "width"))
    for image in content["images"]:
        for key in ("height", "width"):
            if not isinstance(image[key], int) or image[key] < 1:
                raise ValueError(f"image {image['id']} has {key} {image[key]!r}; it must be a positive integer")
    for key in ("categories", "images", *(["annotations"] if for_training else [])):
        if not content[key]:
            raise ValueError(f"its list '{key}' is empty")
    if "annotations" not in content:
        return
    fields = ["id", "image_id", "category_id", "bbox"]
    fields += ["segmentation"] if masks else []
    fields += [] if for_training else ["area", "iscrowd"]
    _check_fields("annotations", content["annotations"], fields)
    for kind in ("categories", "images", "annotations"):
        twice = [id for id, count in Counter(record["id"] for record in content[kind]).items() if count > 1]
        if twice:
            raise ValueError(f"{kind}: the id {twice[0]!r} is given more than once")
    known = {"image_id": _ids(content["images"]), "category_id": _ids(content["categories"])}
    if for_training and not any(_teaches(annotation, masks) for annotation in content["annotations"]):
        kind = "that is no crowd" + (" and has a mask: an RLE, or polygons of three points or more" if masks else "")
        raise ValueError(f"it has no annotation {kind}, so there is nothing to learn from")
    for annotation in content["annotations"]:
        box = annotation["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(_is_number(value) for value in box)):
            raise ValueError(
                f"annotation {annotation['id']} has bbox {box}; it must be four numbers: x, y, width, height"
            )
        for key, ids in known.items():
            if annotation[key] not in ids:
                raise ValueError(f"annotation {annotation['id']} has {key} {annotation[key]}, which is not in the file")


def _teaches(annotation: dict, masks: bool) -> bool:
    """Whether Detectron2 trains on an annotation; it leaves out crowds, and objects without a valid mask."""
    if annotation.get("iscrowd", 0):
        return False
    mask = annotation.get("segmentation")
    polygons = mask if isinstance(mask, list) else []
    valid = any(isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in polygons)
    return not masks or valid or isinstance(mask, dict)


def _check_fields(kind: str, records: Iterable[Any], fields: Iterable[str]) -> None:
    fields = tuple(fields)
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"{kind}[{index}] is a {type(record).__name__}, not an object")
        for key in fields:
            if key not in record:
                name = f" (id {record['id']})" if "id" in record else ""
                raise ValueError(f"{kind}[{index}]{name} has no field '{key}'")


def _ids(records: Iterable[dict]) -> set:
    return {record["id"] for record in records}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _check_images(name: str, image_root: str, file_names: list[str], problems: list[str]) -> None:
    root = PathManager.get_local_path(image_root) if "://" in image_root else image_root
    if not os.path.isdir(root):
        problems.append(f"Data set {name}: {_missing(root)} {_where_to_look(root)}")
        return
    # one listing for each folder instead of a question for each file, which network disks answer slowly
    by_folder: dict[str, set[str]] = {}
    for file_name in file_names:
        folder, base = os.path.split(os.path.join(root, file_name))
        by_folder.setdefault(folder, set()).add(base)
    missing = []
    for folder, wanted in by_folder.items():
        present = set(os.listdir(folder)) if os.path.isdir(folder) else set()
        missing += [os.path.join(folder, base) for base in wanted - present]
    if missing:
        problems.append(
            f"Data set {name}: {len(missing)} of {len(file_names)} images are missing, for example {min(missing)}. "
            "Fetch them, or take them out of the json."
        )
