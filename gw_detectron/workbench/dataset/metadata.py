"""Metadata of datasets as Detectron2 names them: classes, and the names of keypoints."""

import re
from collections.abc import Mapping
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from .coco_content import MALFORMED, category_names
from .source import CocoSource, is_foreign

#: patterns of the left side in names of keypoints, and the right side; one letter is a word of its own
_SIDES = {
    "left": "right",
    "Left": "Right",
    "LEFT": "RIGHT",
    r"(?<![A-Za-z])l(?![A-Za-z])": "r",
    r"(?<![A-Za-z])L(?![A-Za-z])": "R",
}


def coco_metadata(source: CocoSource) -> dict[str, Any]:
    """Return the metadata of an open dataset; without classes if it cannot be read."""
    dataset = source.dataset
    content = None if source.error else source.content
    metadata: dict[str, Any] = {
        "json_file": dataset.json,
        "image_root": dataset.images,
        "evaluator_type": "coco",
        "source": source.labels.path,
        "made_by": dataset.made_by,
    }
    points = dataset.keypoint_names or _keypoint_names(content)
    if points:
        metadata["keypoint_names"] = points
        pairs = dataset.keypoint_flip_map or _mirrored(points)
        metadata["keypoint_flip_map"] = [tuple(pair) for pair in pairs]

    return metadata | _class_fields(category_names(content))


def _keypoint_names(content: Any) -> list[str]:
    """Return the names of keypoints in the categories of a file; [] unless all agree."""
    try:
        lists = [c["keypoints"] for c in content["categories"] if c.get("keypoints")]
    except MALFORMED:
        return []
    first = lists[0] if lists else []
    is_names = isinstance(first, list) and all(isinstance(name, str) for name in first)
    return first if is_names and all(names == first for names in lists) else []


def _mirrored(names: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of names that differ only in left and right."""
    pairs = []
    for name in names:
        for left, right in _SIDES.items():
            other = re.sub(left, right, name)
            if other != name and other in names:
                pairs.append((name, other))
    return pairs


def _class_fields(classes: Mapping[int, str]) -> dict[str, Any]:
    """Return Detectron2's metadata of classes, by category id in the order of a detector's outputs."""
    if not classes:
        return {}
    indices = {number: index for index, number in enumerate(classes)}
    return {
        "thing_classes": list(classes.values()),
        "thing_dataset_id_to_contiguous_id": indices,
    }


def classes_of(metadata: Metadata) -> dict[int, str]:
    """Return the class names of a dataset by category id, in the order of a detector's outputs."""
    names = metadata.get("thing_classes") or []
    indices = metadata.get("thing_dataset_id_to_contiguous_id")
    if not indices:
        return dict(enumerate(names))
    in_order = sorted(indices, key=indices.__getitem__)
    return {number: names[indices[number]] for number in in_order}


def class_metadata(cfg: CfgNode, trained: Mapping[int, str] | None = None) -> Metadata:
    """Return ``thing_classes`` and ``thing_dataset_id_to_contiguous_id`` of a config's model; empty if unknown.

    ``trained`` has the classes that the model's checkpoint records, by category id; they decide.
    """
    for name in (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN):
        # names such as custom_train come from flags: in this process, another run may have registered its datasets
        # under them
        if not is_foreign(name):
            continue
        metadata = MetadataCatalog.get(name)
        classes = classes_of(metadata)
        if classes and (not trained or classes == trained):
            return metadata
    return Metadata(**_class_fields(trained or {}))
