"""Check a COCO file in one pass over its annotations."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from detectron2.config import CfgNode

from ..errors import DataError, summarize_names

_IMAGE_FIELDS = {"id", "file_name", "height", "width"}


class DatasetNeeds(NamedTuple):
    """What a run needs of a dataset."""

    training: bool  # else evaluation
    masks: bool = False
    run_lengths: bool = True  # a segmentation may be an RLE
    keypoints: int = 0  # per object

    @classmethod
    def of(cls, cfg: CfgNode, *, training: bool) -> "DatasetNeeds":
        """Return the needs of a config."""
        points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0
        return cls(training, cfg.MODEL.MASK_ON, not training or cfg.INPUT.MASK_FORMAT != "polygon", points)

    def fields(self) -> set[str]:
        """Return the fields that every annotation needs."""
        fields = {"id", "image_id", "category_id", "bbox"}
        fields |= {"keypoints"} if self.keypoints else set()
        fields |= set() if self.training else {"area", "iscrowd"}  # pycocotools reads them
        return fields | ({"num_keypoints"} if self.keypoints and not self.training else set())


class Fault(NamedTuple):
    """A fault of annotations, refused or warned of; ``of_most`` counts only if more than half have it."""

    text: str  # completes "3 of 8 annotations"
    fix: str
    refused: bool = True
    of_most: bool = False


REPEATED_ID = Fault("repeat an id", "number the annotations from 1")
UNKNOWN_IMAGE = Fault("have an image_id that is not in the list of images", "correct it")
UNKNOWN_CATEGORY = Fault("have a category_id that is not in the list of categories", "correct it")
NO_NUMBERS = Fault("have a bbox that is not four numbers", "write x, y, width and height in pixels")
NORMALIZED = Fault("have a bbox that looks normalized by the image's size", "write pixels", of_most=True)
CORNERS = Fault("have a bbox that looks like x1 y1 x2 y2", "write [x1, y1, x2 - x1, y2 - y1]", of_most=True)
NO_AREA = Fault("have an empty bbox, which is not trained on or evaluated", "correct or remove them", refused=False)
OUTSIDE = Fault("have a bbox outside of their image", "correct or remove them", refused=False)
NO_MASK = Fault("have no segmentation", "set MODEL.MASK_ON False, or add masks to the file")
NO_POLYGON = Fault("have no polygon of three or more points, and are not learned", "correct them", refused=False)
RUN_LENGTHS = Fault("have an RLE as segmentation", "set INPUT.MASK_FORMAT bitmask")
ID_0 = Fault("have id 0, whose match pycocotools counts as a miss", "number them from 1", refused=False)
KEYPOINTS = Fault("have another number of keypoints than MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", "change this key")


def check_coco(content: Any, needs: DatasetNeeds) -> tuple[list[str], list[str]]:
    """Check the content of a COCO file.

    Returns:
        Errors and warnings; each counts the annotations with one fault.

    Raises:
        DataError: the content is not in COCO format.
    """
    record: Any = "the lists images, annotations and categories"
    try:
        for record in content["images"]:
            if missing := _IMAGE_FIELDS - record.keys():
                raise DataError(f"image {record.get('id', '')}: has no {', '.join(sorted(missing))}")
        images = {image["id"]: image for image in content["images"]}
        if len(images) < len(content["images"]):
            raise DataError("images: two have the same id")
        categories = {category["id"]: category["name"] for category in content["categories"]}
        found: dict[Fault, list[Any]] = defaultdict(list)
        # the official test images have no annotations
        annotations = content["annotations"] if needs.training else content.get("annotations", [])
        ids, learnable, fields = set(), 0, needs.fields()
        for record in annotations:
            number = record.get("id")
            if missing := fields - record.keys():
                found[Fault(f"have no {', '.join(sorted(missing))}", "add it")].append(number)
                continue
            faults = [REPEATED_ID] if number in ids else []
            ids.add(number)
            image = images.get(record["image_id"])
            faults += [UNKNOWN_IMAGE] if image is None else _box_faults(record["bbox"], image)
            faults += [] if record["category_id"] in categories else [UNKNOWN_CATEGORY]
            faults += _object_faults(record, needs)
            learnable += not (record.get("iscrowd") or {NO_AREA, OUTSIDE, NO_POLYGON}.intersection(faults))
            for fault in faults:
                found[fault].append(number)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise DataError(f"not in COCO format at {record!s:.80}: {type(error).__name__}: {error}") from error
    if needs.training and not learnable:
        raise DataError("nothing to learn from: no annotation, or only crowds and objects without area or polygon")
    messages: dict[bool, list[str]] = {True: [], False: []}
    for fault, numbers in found.items():
        if not fault.of_most or len(numbers) > len(annotations) / 2:
            messages[fault.refused].append(
                f"{len(numbers)} of {len(annotations)} annotations {fault.text} "
                f"(ids {summarize_names(map(str, numbers))}). Fix: {fault.fix}."
            )
    return messages[True], messages[False]


def _box_faults(box: Any, image: dict[str, Any]) -> Iterator[Fault]:
    if len(box) != 4 or not all(map(math.isfinite, box)):
        yield NO_NUMBERS
        return
    x, y, width, height = box
    right, bottom = image["width"], image["height"]
    if max(box) <= 1:
        yield NORMALIZED
    leaves = x + width > right + 1 or y + height > bottom + 1  # one pixel: rounding
    if leaves and x < width <= right + 1 and y < height <= bottom + 1:
        yield CORNERS
    if width <= 0 or height <= 0:
        yield NO_AREA
    elif min(x + width, right) <= max(x, 0) or min(y + height, bottom) <= max(y, 0):
        yield OUTSIDE


def _object_faults(record: dict[str, Any], needs: DatasetNeeds) -> Iterator[Fault]:
    crowd, mask = record.get("iscrowd"), record.get("segmentation")
    if needs.keypoints and len(record["keypoints"]) != 3 * needs.keypoints:
        yield KEYPOINTS
    if record["id"] == 0 and not needs.training:
        yield ID_0
    if not needs.masks or (crowd and needs.training):  # crowds are not trained on
        return
    if not mask:
        yield NO_MASK
    elif isinstance(mask, dict):
        if not needs.run_lengths:
            yield RUN_LENGTHS
    elif not any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in mask):
        yield NO_POLYGON
