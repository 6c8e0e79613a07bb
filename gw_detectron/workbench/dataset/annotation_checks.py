"""Check a COCO file in one pass over its annotations."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError, summarize_names
from .coco_files import is_match_id
from .geometry import (
    Flags,
    Floats,
    corners,
    far_apart,
    is_coordinates,
    is_polygon,
    mask_boxes,
    wrong_areas,
)

_IMAGE_FIELDS = {"id", "file_name", "height", "width"}


class DatasetNeeds(NamedTuple):
    """What a run needs of a dataset."""

    training: bool  # else evaluation
    masks: bool = False
    run_lengths: bool = True  # a segmentation may be an RLE
    keypoints: int = 0  # per object
    percentiles: Sequence[float] = ()  # for images of more than 8 bits

    def fields(self) -> set[str]:
        """Return the fields that every annotation needs."""
        evaluated = (
            set() if self.training else {"area", "iscrowd", "num_keypoints"}
        )  # pycocotools reads them
        fields = {"id", "image_id", "category_id", "bbox", "keypoints"} | evaluated
        return fields if self.keypoints else fields - {"keypoints", "num_keypoints"}


class Fault(NamedTuple):
    """A fault of annotations: a warning above one share of them, an error above another."""

    text: str  # completes "3 of 8 annotations"
    fix: str
    error_above: float = 0.0  # 1: never
    warn_above: float = 0.0


_MOST = {"error_above": 0.5, "warn_above": 0.5}  # looks so, and fewer could be chance
REPEATED_ID = Fault("repeat an id", "number the annotations from 1")
UNKNOWN_IMAGE = Fault("have an image_id that is not in the list of images", "correct it")
UNKNOWN_CATEGORY = Fault(
    "have a category_id that is not in the list of categories", "correct it"
)
NO_NUMBERS = Fault(
    "have a bbox that is not four numbers", "write x, y, width and height in pixels"
)
NORMALIZED = Fault(
    "have a bbox that looks normalized by the image's size", "write pixels", **_MOST
)
CORNERS = Fault(
    "have a bbox that looks like x1 y1 x2 y2", "write [x1, y1, x2 - x1, y2 - y1]", **_MOST
)
MASK_CORNERS = Fault("have a bbox that is x1 y1 x2 y2, by their mask", CORNERS.fix, 0.1)
NO_AREA = Fault(
    "have an empty bbox, which is not trained on or evaluated", "correct or remove them", 1
)
OUTSIDE = Fault("have a bbox outside of their image", "correct or remove them", 1)
BEYOND = Fault(
    "have a bbox that leaves their image by more than a tenth of it", "correct or clip them", 1
)
NO_MASK = Fault("have no segmentation", "set MODEL.MASK_ON False, or add masks to the file")
NO_POLYGON = Fault(
    "have no polygon of three or more points, and are not learned",
    "correct or remove segmentations",
    1,
)
NO_COORDINATES = Fault(
    "have a polygon that is not a flat list of numbers", "write [x0, y0, x1, y1, ...]"
)
RUN_LENGTHS = Fault("have an RLE as segmentation", "set INPUT.MASK_FORMAT bitmask")
OTHER_SIZE = Fault(
    "have an RLE of another size than their image", "encode the mask of the whole image"
)
NO_PIXEL = Fault(
    "have an empty mask, which no detection can match", "correct or remove them", 0.1
)
APART = Fault(
    "have a mask far from their bbox",
    "write [x, y, width, height] and masks in pixels of one image",
    0.1,
)
SMALLER = Fault(
    "have a mask much smaller than their bbox",
    "correct one, unless boxes include hidden parts",
    1,
)
CROWDS = Fault(
    "are crowds (iscrowd 1 or ignore): not trained on, not counted",
    "set both to 0 for single ones",
    1,
    0.1,
)
REPEATED = Fault(
    "repeat the bbox and category of another one; at most one of them can be found",
    "remove them",
    1,
)
AREA = Fault(
    "have an area, used in COCO scores, that fits neither their mask nor their bbox",
    "correct it",
    0.1,
)
NO_ID = Fault(
    "have an id that is not a positive integer: a match may be a miss", "number them from 1", 1
)
KEYPOINTS = Fault(
    "have another number of keypoints than MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS",
    "change this key; write three zeros for a keypoint that is not labeled",
)
KEYPOINTS_APART = Fault(
    "have most keypoints outside of their bbox", "correct them; both are in pixels", 0.1
)
COUNTS = Fault(
    "have a num_keypoints other than the number of labeled keypoints", "correct it", 0.1
)


def check_coco(content: Any, needs: DatasetNeeds) -> tuple[list[str], list[str]]:
    """Return errors and warnings, which count the annotations with a fault; another format is a DataError."""
    record: Any = "the lists images, annotations and categories"
    try:
        for record in content["images"]:
            if missing := _IMAGE_FIELDS - record.keys():
                raise DataError(
                    f"image {record.get('id', '')}: has no {', '.join(sorted(missing))}"
                )
            if min(record["height"], record["width"]) < 1:
                raise DataError(
                    f"image {record['id']}: has no pixels: its width or height is below 1"
                )
            os.fspath(record["file_name"])  # else a TypeError
        images = {image["id"]: image for image in content["images"]}
        if not images or len(images) < len(content["images"]):
            raise DataError(
                "images: two have the same id" if images else "images: the list is empty"
            )
        categories = {category["id"]: category["name"] for category in content["categories"]}
        for number, name in categories.items():
            if not isinstance(name, str):
                raise DataError(
                    f"category {number}: name ({name!r:.80}) is not a string. Fix: put it in quotes."
                )
        found: dict[Fault, list[Any]] = defaultdict(list)
        # the official test images have no annotations
        annotations = (
            content["annotations"] if needs.training else content.get("annotations", [])
        )
        ids, measured, fields = set(), [], needs.fields()
        for record in annotations:
            number = record.get("id")
            if missing := fields - record.keys():
                found[Fault(f"have no {', '.join(sorted(missing))}", "add it")].append(number)
                continue
            faults = [REPEATED_ID] if number in ids else []
            ids.add(number)
            box, image = record["bbox"], images.get(record["image_id"])
            faults += [UNKNOWN_IMAGE] if image is None else []
            faults += [] if len(box) == 4 and all(map(math.isfinite, box)) else [NO_NUMBERS]
            faults += [] if record["category_id"] in categories else [UNKNOWN_CATEGORY]
            if not faults:
                measured.append(record)
                faults += _keypoint_faults(record, needs) if needs.keypoints else []
            faults += [] if needs.training or is_match_id(number) else [NO_ID]
            for fault in faults:
                found[fault].append(number)
        record = "segmentation"
        learnable = _check_geometry(measured, images, needs, found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"not in COCO format at {record!s:.80}: {type(error).__name__}: {error}"
        ) from error
    if needs.training and not learnable:
        raise DataError(
            "nothing to learn from: no annotation, or only crowds and objects without area or mask"
        )
    errors, warnings = describe(found, len(annotations), "annotations", "ids ")
    if twins := [name for name, count in Counter(categories.values()).items() if count > 1]:
        warnings.append(
            f"categories of one name ({summarize_names(twins)}) are two classes. Fix: rename or join them."
        )
    return errors, warnings


def describe(
    found: Mapping[Fault, Sequence[Any]], count: int, kind: str, names: str = ""
) -> tuple[list[str], list[str]]:
    """Return errors and warnings that count and name the records with each fault."""
    messages: dict[bool, list[str]] = {True: [], False: []}
    for fault, records in found.items():
        if (share := len(records) / max(1, count)) > fault.warn_above:
            messages[share > fault.error_above].append(
                f"{len(records)} of {count} {kind} {fault.text} ({names}{summarize_names(map(str, records))}). "
                f"Fix: {fault.fix}."
            )
    return messages[True], messages[False]


def _check_geometry(
    records: list[dict[str, Any]],
    images: dict[Any, dict],
    needs: DatasetNeeds,
    found: dict[Fault, list[Any]],
) -> int:
    """Compare boxes, masks and areas; add to the faults; return the number of objects that can be learned."""
    if not records:
        return 0
    sizes = [
        (image["height"], image["width"])
        for image in (images[each["image_id"]] for each in records)
    ]
    boxes, limits = np.array([each["bbox"] for each in records], float), np.array(sizes, float)
    masks = [each.get("segmentation") for each in records]
    outlines, areas = mask_boxes(masks, sizes)
    crowd = np.array([bool(each.get("iscrowd")) for each in records])
    faults = _box_faults(boxes, limits)
    lost = crowd | faults[NO_AREA] | faults[OUTSIDE]
    apart = (
        ~crowd & ~faults[NO_AREA] & (areas > 0) & far_apart(corners(boxes), outlines, limits)
    )
    faults = {
        fault: flags & ~apart for fault, flags in faults.items()
    }  # what the mask says is surer
    within = (outlines[:, :2] > boxes[:, :2] - 1) & (
        outlines[:, 2:] < corners(boxes)[:, 2:] + 1
    )
    as_corners = apart & ~far_apart(boxes, outlines, np.full_like(limits, np.inf))
    smaller = apart & within.all(axis=1) & ~as_corners
    faults |= {
        APART: apart & ~smaller & ~as_corners,
        MASK_CORNERS: as_corners,
        SMALLER: smaller,
        CROWDS: crowd,
    }
    used, given = ~(crowd & needs.training), np.array([bool(mask) for mask in masks])
    encoded = np.array([isinstance(mask, dict) for mask in masks])
    flat = np.array(
        [not mask or isinstance(mask, dict) or all(map(is_coordinates, mask)) for mask in masks]
    )
    drawn = np.array([isinstance(mask, list) and any(map(is_polygon, mask)) for mask in masks])
    # without masks, too, Detectron2 drops an object without a valid polygon, with its box
    faults |= {
        NO_POLYGON: ~crowd & given & flat & ~drawn & ~encoded,
        NO_COORDINATES: used & ~flat,
    }
    if needs.masks:
        faults |= {
            NO_MASK: used & ~given,
            RUN_LENGTHS: ~crowd & encoded & (not needs.run_lengths),
        }
        faults |= {OTHER_SIZE: used & encoded & np.isnan(areas), NO_PIXEL: used & (areas == 0)}
        faults[NO_COORDINATES] |= used & drawn & np.isnan(areas)
    lost |= faults[NO_POLYGON] | faults.get(NO_PIXEL, False)
    keys = [(each["image_id"], each["category_id"], *each["bbox"]) for each in records]
    counts = Counter(keys)
    faults[REPEATED] = np.array([counts[key] > 1 for key in keys])
    if not needs.training:
        given = np.array([each["area"] for each in records], float)
        faults[AREA] = ~crowd & wrong_areas(given, boxes[:, 2:].prod(axis=1), areas)
    for fault, flags in faults.items():
        if flags.any():
            found[fault] += [records[index]["id"] for index in np.flatnonzero(flags)]
    return int((~lost).sum())


def _box_faults(boxes: Floats, sizes: Floats) -> dict[Fault, Flags]:
    edges, limits = corners(boxes), np.tile(sizes[:, ::-1], 2)
    inside = np.clip(edges, 0, limits)
    off = (edges > limits + 1).any(axis=1)  # one pixel: rounding
    empty = (boxes[:, 2:] <= 0).any(axis=1)
    outside = (inside[:, 2:] <= inside[:, :2]).any(axis=1) & ~empty
    as_corners = (
        off & (boxes[:, :2] < boxes[:, 2:]).all(axis=1) & (boxes <= limits + 1).all(axis=1)
    )
    beyond = (np.abs(inside - edges) > 1 + limits / 10).any(axis=1) & ~outside & ~as_corners
    normalized = boxes.max(axis=1) <= 1
    return {
        NO_AREA: empty,
        OUTSIDE: outside,
        CORNERS: as_corners,
        BEYOND: beyond,
        NORMALIZED: normalized,
    }


def _keypoint_faults(record: dict[str, Any], needs: DatasetNeeds) -> Iterator[Fault]:
    points, (x, y, width, height) = record["keypoints"], record["bbox"]
    if len(points) != 3 * needs.keypoints:
        yield KEYPOINTS
        return
    if record.get("iscrowd"):  # not trained on, not counted
        return
    places = zip(points[::3], points[1::3], points[2::3], strict=True)
    labeled = [(a, b) for a, b, visibility in places if visibility > 0]
    near = sum(
        abs(2 * (a - x) - width) <= 2 * width and abs(2 * (b - y) - height) <= 2 * height
        for a, b in labeled
    )
    if 2 * near < len(labeled):
        yield KEYPOINTS_APART
    if not needs.training and record["num_keypoints"] != len(labeled):
        yield COUNTS
