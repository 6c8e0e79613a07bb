"""Check that the datasets of a run are complete and fit."""

import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from ..errors import DataError
from .findings import Findings

#: values of a dataset's metadata ``evaluator_type`` that are evaluated by the COCO rules
COCO_EVALUATORS = ("coco", "coco_panoptic_seg")
_FORMATS = ("RGB", "BGR", "L", "YUV-BT.601")  # Detectron2's image formats
_NUM_CLASSES = {"RetinaNet": "RETINANET", "GeneralizedRCNN": "ROI_HEADS"}


def check_datasets(cfg: CfgNode, findings: Findings, *, eval_only: bool) -> None:
    """Check the datasets of training (unless ``eval_only``) and evaluation."""
    if cfg.INPUT.FORMAT not in _FORMATS:
        findings.problems.append(
            f"INPUT.FORMAT ('{cfg.INPUT.FORMAT}'): unknown. Fix: set it to one of {', '.join(_FORMATS)}."
        )
    needed = "DATASETS.TEST" if eval_only else "DATASETS.TRAIN"
    if not (cfg.DATASETS.TEST if eval_only else cfg.DATASETS.TRAIN):
        findings.problems.append(f"{needed} (empty): no dataset. Fix: name at least one.")
    classes: dict[str, Sequence[str] | None] = {}
    for name in () if eval_only else cfg.DATASETS.TRAIN:
        classes[name] = _check_dataset(name, findings, for_training=True, masks=cfg.MODEL.MASK_ON)
    for name in cfg.DATASETS.TEST:
        classes[name] = _check_dataset(name, findings, for_training=False, masks=cfg.MODEL.MASK_ON)
    if node := _NUM_CLASSES.get(cfg.MODEL.META_ARCHITECTURE):
        key, wanted = f"MODEL.{node}.NUM_CLASSES", cfg.MODEL[node].NUM_CLASSES
        for name, found in classes.items():
            if found is not None and len(found) != wanted:
                findings.problems.append(
                    f"{key} ({wanted}): dataset {name} has {len(found)} classes. Fix: set {key} {len(found)}."
                )
    for name in cfg.DATASETS.TEST:
        kind = MetadataCatalog.get(name).get("evaluator_type")
        if classes[name] is not None and kind not in COCO_EVALUATORS:
            findings.problems.append(
                f"DATASETS.TEST ('{name}'): evaluator_type {kind!r} is not one of {list(COCO_EVALUATORS)}. Fix: if it "
                f'has COCO annotations, set MetadataCatalog.get("{name}").evaluator_type = "coco".'
            )


def _check_dataset(name: str, findings: Findings, *, for_training: bool, masks: bool) -> Sequence[str] | None:
    """Check the files of a dataset.

    Args:
        name: the name in Detectron2's ``DatasetCatalog``.
        findings: problems are added; each names file, field and record.
        for_training: a dataset for evaluation needs more fields, but may lack annotations.
        masks: annotations need a segmentation.

    Returns:
        The class names in the order of their ids, or None if they are unknown.
    """
    if name not in DatasetCatalog:
        near = difflib.get_close_matches(name, list(DatasetCatalog), n=3)
        similar = f" Similar: {', '.join(near)}." if near else ""
        findings.problems.append(
            f"DATASETS ('{name}'): unknown dataset.{similar} Fix: correct the name, or register it first "
            "(detectron2.data.datasets.register_coco_instances)."
        )
        return None
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    if json_file is None:  # registered as a Python function
        return metadata.get("thing_classes")
    where = f"Dataset '{name}': '{json_file}'"
    try:
        path = PathManager.get_local_path(json_file)  # generates or downloads it if a handler does so
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        findings.problems.append(f"Dataset '{name}': {_missing(json_file)}")
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        findings.problems.append(f"{where}: invalid JSON: {error}. Fix: get the file again.")
        return None
    except (OSError, ValueError) as error:
        findings.problems.append(f"{where}: cannot be read: {error}. Fix: put the annotation file there.")
        return None
    try:
        _check_coco(content, for_training=for_training, masks=masks)
    except DataError as error:
        findings.problems.append(f"{where}: {error}. Fix: correct the file.")
        return None
    image_root = metadata.get("image_root")
    if image_root is not None and (missing := _missing_images(image_root, content["images"])):
        findings.problems.append(f"Dataset '{name}': {missing}")
    return [category["name"] for category in sorted(content["categories"], key=lambda category: category["id"])]


def _missing(path: str) -> str:
    """Describe a missing path by its outermost missing part."""
    gone = Path(path)
    while not gone.parent.exists():
        gone = gone.parent
    reason = f"'{gone}' does not exist" + ("." if str(gone) == str(path) else f", so '{path}' is missing.")
    variable = os.environ.get("DETECTRON2_DATASETS")
    if Path(path).is_absolute() and not variable:
        return f"{reason} Fix: put it there, or register the dataset with another path."
    now = f"'{variable}'" if variable else "not set, which means 'datasets'"
    return f"{reason} Fix: set the environment variable DETECTRON2_DATASETS to the folder of the datasets (now {now})."


def _missing_images(image_root: str, images: Sequence[dict]) -> str:
    """Describe missing image files, or return ""."""
    root = PathManager.get_local_path(image_root) if "://" in image_root else image_root
    if not os.path.isdir(root):
        return _missing(root)
    # one listing per folder, because network disks are slow at a query per file
    by_folder: dict[str, set[str]] = {}
    for image in images:
        folder, base = os.path.split(os.path.join(root, image["file_name"]))
        by_folder.setdefault(folder, set()).add(base)
    missing = [
        os.path.join(folder, base)
        for folder, wanted in by_folder.items()
        for base in wanted.difference(os.listdir(folder) if os.path.isdir(folder) else ())
    ]
    if not missing:
        return ""
    return (
        f"{len(missing)} of {len(images)} images are missing, e.g. '{min(missing)}'. Fix: download them, or remove "
        "them from the JSON file."
    )


def _check_coco(content: Any, *, for_training: bool, masks: bool) -> None:
    """Check the fields that Detectron2 and pycocotools read.

    Raises:
        DataError: the first wrong field.
    """
    if not isinstance(content, dict):
        raise DataError(f"{type(content).__name__} instead of an object with images, annotations and categories")
    fields = {"categories": ["id", "name"], "images": ["id", "file_name", "height", "width"]}
    if for_training or "annotations" in content:  # the official test images have no annotations
        fields["annotations"] = ["id", "image_id", "category_id", "bbox"]
        fields["annotations"] += ["segmentation"] if masks else []
        fields["annotations"] += [] if for_training else ["area", "iscrowd"]
    for key in fields:
        if not isinstance(content.get(key), list):
            raise DataError(f"no list '{key}'")
        if not content[key] and (for_training or key != "annotations"):
            raise DataError(f"the list '{key}' is empty")
    for key, names in fields.items():
        _check_fields(key, content[key], names)
        twice = [id for id, count in Counter(record["id"] for record in content[key]).items() if count > 1]
        if twice:
            raise DataError(f"{key}: duplicate id {twice[0]!r}")
    for image in content["images"]:
        for key in ("height", "width"):
            if not isinstance(image[key], int) or image[key] < 1:
                raise DataError(f"image {image['id']}: {key} {image[key]!r} is not a positive integer")
    if "annotations" in fields:
        _check_annotations(content, for_training=for_training, masks=masks)


def _check_fields(kind: str, records: Iterable[Any], fields: Iterable[str]) -> None:
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{kind}[{index}] is a {type(record).__name__}, not an object")
        for key in fields:
            if key not in record:
                name = f" (id {record['id']})" if "id" in record else ""
                raise DataError(f"{kind}[{index}]{name} has no field '{key}'")


def _check_annotations(content: dict, *, for_training: bool, masks: bool) -> None:
    annotations = content["annotations"]
    if for_training and not any(_is_trainable(annotation, masks) for annotation in annotations):
        mask = " or lack a mask (an RLE, or polygons of at least three points)" if masks else ""
        raise DataError(f"all annotations are crowds{mask}, so there is nothing to learn from")
    known = {
        "image_id": {image["id"] for image in content["images"]},
        "category_id": {category["id"] for category in content["categories"]},
    }
    for annotation in annotations:
        box = annotation["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(_is_number(value) for value in box)):
            raise DataError(f"annotation {annotation['id']}: bbox {box} is not four numbers (x, y, width, height)")
        for key, ids in known.items():
            if annotation[key] not in ids:
                raise DataError(f"annotation {annotation['id']}: {key} {annotation[key]} does not exist in the file")


def _is_trainable(annotation: dict, masks: bool) -> bool:
    """Tell whether Detectron2 trains on an annotation.

    It skips crowds and, with ``masks``, objects without a valid mask.
    """
    if annotation.get("iscrowd", 0):
        return False
    mask = annotation.get("segmentation")
    polygons = mask if isinstance(mask, list) else []
    valid = any(isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in polygons)
    return not masks or valid or isinstance(mask, dict)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
