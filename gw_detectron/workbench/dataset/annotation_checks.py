"""Check a COCO file in one pass over its annotations."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError, summarize_names
from .coco_content import (
    LARGEST_ID,
    MALFORMED,
    complete_annotations,
    is_match_id,
    replaced_values,
)
from .geometry import (
    Flags,
    Floats,
    corners,
    far_apart,
    is_coordinates,
    is_polygon,
    mask_boxes,
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
UNKNOWN_IMAGE = Fault(
    "have an image_id that is not in the list of images", "correct it"
)
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
    "have a bbox that looks like x1 y1 x2 y2",
    "write [x1, y1, x2 - x1, y2 - y1]",
    **_MOST,
)
MASK_CORNERS = Fault("have a bbox that is x1 y1 x2 y2, by their mask", CORNERS.fix, 0.1)
NO_AREA = Fault(
    "have an empty bbox, which is not trained on or evaluated",
    "correct or remove them",
    1,
)
OUTSIDE = Fault("have a bbox outside of their image", "correct or remove them", 1)
BEYOND = Fault(
    "have a bbox that leaves their image by more than a tenth of it",
    "correct or clip them",
    1,
)
NO_MASK = Fault(
    "have no segmentation", "set MODEL.MASK_ON False, or add masks to the file"
)
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
    "have an id that is not a positive integer: a match may be a miss",
    "number them from 1",
    1,
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


class _Reader:
    """Iterates over records, and remembers the record that an error is about."""

    def __init__(self) -> None:
        self.record: Any = "the lists images, annotations and categories"

    def read(self, records: Iterable[Any]) -> Iterator[Any]:
        for self.record in records:
            yield self.record


def check_coco(
    content: Any, needs: DatasetNeeds, *, is_filled_in: bool = False
) -> tuple[list[str], list[str]]:
    """Return errors and warnings, which count the annotations with a fault.

    What :func:`complete_coco` repairs is checked only in a content that is not completed. Another format is a
    DataError.
    """
    reader = _Reader()
    found: dict[Fault, list[Any]] = defaultdict(list)
    try:
        images = _check_images(reader, content["images"])
        categories = {c["id"]: c["name"] for c in reader.read(content["categories"])}
        _check_names(categories)

        # the official test images have no annotations
        annotations = (
            content["annotations"] if needs.training else content.get("annotations", [])
        )
        sound = []
        for annotation in reader.read(annotations):
            faults = _reference_faults(annotation, images, categories, needs)
            if not faults:
                sound.append(annotation)
                faults = _keypoint_faults(annotation, needs)
            for fault in faults:
                found[fault].append(annotation.get("id"))
        found[REPEATED_ID] += _repeated(
            annotation.get("id") for annotation in annotations
        )

        reader.record = "segmentation"
        learnable = _check_geometry(sound, images, needs, found)
        if not (needs.training or is_filled_in):
            _check_evaluated_fields({**content, "annotations": sound}, needs, found)
    except DataError:
        raise
    except MALFORMED as error:
        raise DataError(
            f"not in COCO format at {reader.record!s:.80}: {type(error).__name__}: {error}"
        ) from error

    if needs.training and not learnable:
        raise DataError(
            "nothing to learn from: no annotation, or only crowds and objects without area or mask"
        )
    errors, warnings = describe(found, len(annotations), "annotations", "ids ")
    twins = [name for name, count in Counter(categories.values()).items() if count > 1]
    if twins:
        warnings.append(
            f"categories of one name ({summarize_names(twins)}) are two classes. Fix: rename or join them."
        )
    return errors, warnings


def describe(
    found: Mapping[Fault, Sequence[Any]], count: int, kind: str, names: str = ""
) -> tuple[list[str], list[str]]:
    """Return errors and warnings that count and name the records with each fault."""
    errors: list[str] = []
    warnings: list[str] = []
    for fault, records in found.items():
        share = len(records) / max(1, count)
        if share <= fault.warn_above:
            continue
        messages = errors if share > fault.error_above else warnings
        messages.append(
            f"{len(records)} of {count} {kind} {fault.text} ({names}{summarize_names(map(str, records))}). "
            f"Fix: {fault.fix}."
        )
    return errors, warnings


def _check_images(reader: _Reader, images: Sequence[dict]) -> dict[Any, dict]:
    """Return the images by id; raise DataError unless each has the fields that Detectron2 reads."""
    for image in reader.read(images):
        missing = _IMAGE_FIELDS - image.keys()
        if missing:
            raise DataError(
                f"image {image.get('id', '')}: has no {', '.join(sorted(missing))}"
            )
        if min(image["height"], image["width"]) < 1:
            raise DataError(
                f"image {image['id']}: has no pixels: its width or height is below 1"
            )
        os.fspath(image["file_name"])  # else a TypeError
        _check_id(image["id"], "image")

    by_id = {image["id"]: image for image in images}
    if not by_id:
        raise DataError("images: the list is empty")
    if len({type(number) for number in by_id}) > 1:
        raise DataError(
            "images: some ids are numbers and some texts. Fix: number them from 1."
        )
    if len(by_id) < len(images):
        raise DataError("images: two have the same id")
    return by_id


def _repeated(numbers: Iterable[Any]) -> list[Any]:
    """Return the ids that have been seen before, once for each repetition."""
    counts = Counter(number for number in numbers if number is not None)
    return [number for number in counts for _ in range(counts[number] - 1)]


def _check_id(number: Any, kind: str) -> None:
    if isinstance(number, int) and abs(number) > LARGEST_ID:
        raise DataError(
            f"{kind} {number}: the id is above 2^53, which the evaluation cannot store. Fix: number them from 1."
        )


def _check_names(categories: Mapping[Any, Any]) -> None:
    for number, name in categories.items():
        _check_id(number, "category")
        if not isinstance(name, str):
            raise DataError(
                f"category {number}: name ({name!s:.80}) is not a string. Fix: put it in quotes."
            )


def _reference_faults(
    annotation: dict[str, Any],
    images: Mapping[Any, dict],
    categories: Mapping[Any, str],
    needs: DatasetNeeds,
) -> list[Fault]:
    """Return the faults for which an annotation cannot be used at all."""
    missing = needs.fields() - annotation.keys()
    if missing:
        return [Fault(f"have no {', '.join(sorted(missing))}", "add it")]

    faults = []
    if annotation["image_id"] not in images:
        faults.append(UNKNOWN_IMAGE)
    box = annotation["bbox"]
    if len(box) != 4 or not all(map(math.isfinite, box)):
        faults.append(NO_NUMBERS)
    if annotation["category_id"] not in categories:
        faults.append(UNKNOWN_CATEGORY)
    return faults


def _keypoint_faults(annotation: dict[str, Any], needs: DatasetNeeds) -> list[Fault]:
    if not needs.keypoints:
        return []
    keypoints = annotation["keypoints"]
    if len(keypoints) != 3 * needs.keypoints:
        return [KEYPOINTS]
    if annotation.get("iscrowd"):  # not trained on, not counted
        return []

    x, y, width, height = annotation["bbox"]
    labeled = near = 0
    for a, b, visibility in zip(
        keypoints[::3], keypoints[1::3], keypoints[2::3], strict=True
    ):
        if visibility > 0:
            labeled += 1
            # within twice the box
            near += (
                abs(2 * (a - x) - width) <= 2 * width
                and abs(2 * (b - y) - height) <= 2 * height
            )
    return [KEYPOINTS_APART] if 2 * near < labeled else []


def _check_evaluated_fields(
    content: Any, needs: DatasetNeeds, found: dict[Fault, list[Any]]
) -> None:
    """Find wrong fields that pycocotools reads, in a file that is evaluated as it is."""
    counted = [
        annotation for annotation in content["annotations"] if not annotation["iscrowd"]
    ]
    replaced = replaced_values(
        counted, complete_annotations({**content, "annotations": counted})
    )
    found[AREA] += replaced["area"]
    if needs.keypoints:
        found[COUNTS] += replaced["num_keypoints"]
    numbers = [annotation["id"] for annotation in content["annotations"]]
    found[NO_ID] += [number for number in numbers if not is_match_id(number)]


def _check_geometry(
    annotations: list[dict[str, Any]],
    images: Mapping[Any, dict],
    needs: DatasetNeeds,
    found: dict[Fault, list[Any]],
) -> int:
    """Compare boxes and masks; add to the faults; return the number of objects that can be learned."""
    if not annotations:
        return 0
    boxes = np.array([annotation["bbox"] for annotation in annotations], float)
    owners = [images[annotation["image_id"]] for annotation in annotations]
    sizes = [(image["height"], image["width"]) for image in owners]
    limits = np.array(sizes, float)
    masks = [annotation.get("segmentation") for annotation in annotations]
    is_crowd = np.array([bool(annotation.get("iscrowd")) for annotation in annotations])

    outlines, areas = mask_boxes(masks, sizes)
    faults = _box_faults(boxes, limits)
    lost = is_crowd | faults[NO_AREA] | faults[OUTSIDE]

    comparable = ~is_crowd & ~faults[NO_AREA] & (areas > 0)
    apart = comparable & far_apart(corners(boxes), outlines, limits)
    # the mask is the surer sign
    faults = {fault: flags & ~apart for fault, flags in faults.items()}
    faults |= _apart_faults(apart, boxes, outlines)
    faults |= _mask_faults(masks, areas, is_crowd, needs)
    lost |= faults[NO_POLYGON]
    if needs.masks:
        lost |= faults[NO_PIXEL]

    keys = [(a["image_id"], a["category_id"], *a["bbox"]) for a in annotations]
    counts = Counter(keys)
    faults[REPEATED] = np.array([counts[key] > 1 for key in keys])
    faults[CROWDS] = is_crowd

    for fault, flags in faults.items():
        found[fault] += [annotations[index]["id"] for index in np.flatnonzero(flags)]
    return int((~lost).sum())


def _box_faults(boxes: Floats, sizes: Floats) -> dict[Fault, Flags]:
    edges = corners(boxes)
    limits = np.tile(sizes[:, ::-1], 2)
    inside = np.clip(edges, 0, limits)
    is_off = (edges > limits + 1).any(axis=1)  # one pixel: rounding

    is_empty = (boxes[:, 2:] <= 0).any(axis=1)
    is_outside = (inside[:, 2:] <= inside[:, :2]).any(axis=1) & ~is_empty
    in_order = (boxes[:, :2] < boxes[:, 2:]).all(axis=1) & (boxes <= limits + 1).all(
        axis=1
    )
    as_corners = is_off & in_order
    leaves = (np.abs(inside - edges) > 1 + limits / 10).any(axis=1)
    return {
        NO_AREA: is_empty,
        OUTSIDE: is_outside,
        CORNERS: as_corners,
        BEYOND: leaves & ~is_outside & ~as_corners,
        NORMALIZED: boxes.max(axis=1) <= 1,
    }


def _apart_faults(apart: Flags, boxes: Floats, outlines: Floats) -> dict[Fault, Flags]:
    """Say why boxes are far from their masks: written as corners, larger than the mask, or elsewhere."""
    unlimited = np.full((len(boxes), 2), np.inf)
    as_corners = apart & ~far_apart(boxes, outlines, unlimited)

    edges = corners(boxes)
    begins_inside = outlines[:, :2] > edges[:, :2] - 1
    ends_inside = outlines[:, 2:] < edges[:, 2:] + 1
    smaller = apart & (begins_inside & ends_inside).all(axis=1) & ~as_corners
    return {
        APART: apart & ~smaller & ~as_corners,
        MASK_CORNERS: as_corners,
        SMALLER: smaller,
    }


def _mask_faults(
    masks: Sequence[Any], areas: Floats, is_crowd: Flags, needs: DatasetNeeds
) -> dict[Fault, Flags]:
    """Find segmentations that Detectron2 cannot read. ``areas`` are NaN where none is usable."""
    is_used = ~(is_crowd & needs.training)
    is_given = np.array([bool(mask) for mask in masks])
    is_rle = np.array([isinstance(mask, dict) for mask in masks])
    is_flat = np.array([_is_flat(mask) for mask in masks])
    is_drawn = np.array(
        [isinstance(mask, list) and any(map(is_polygon, mask)) for mask in masks]
    )

    faults = {
        # without masks, too, Detectron2 drops an object without a valid polygon, with its box
        NO_POLYGON: ~is_crowd & is_given & is_flat & ~is_drawn & ~is_rle,
        NO_COORDINATES: is_used & ~is_flat,
    }
    if needs.masks:
        faults[NO_COORDINATES] |= is_used & is_drawn & np.isnan(areas)
        faults[NO_MASK] = is_used & ~is_given
        faults[RUN_LENGTHS] = ~is_crowd & is_rle & (not needs.run_lengths)
        faults[OTHER_SIZE] = is_used & is_rle & np.isnan(areas)
        faults[NO_PIXEL] = is_used & (areas == 0)
    return faults


def _is_flat(mask: Any) -> bool:
    """Return whether all polygons of a segmentation, if it has polygons, are lists of numbers."""
    return not mask or isinstance(mask, dict) or all(map(is_coordinates, mask))
