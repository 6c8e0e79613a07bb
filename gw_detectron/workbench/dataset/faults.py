"""Faults that records of a dataset can have, and messages that count and name the records."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import CheckReport, summarize_names


class Fault(NamedTuple):
    """A fault of annotations or images: a warning above one share of them, an error above another."""

    text: str  # completes "3 of 8 annotations"
    fix: str
    error_above: float = 0.0  # 1: never
    warn_above: float = 0.0


_MOST = {"error_above": 0.5, "warn_above": 0.5}  # looks so, and fewer could be chance
UNKNOWN_IMAGE = Fault(
    "have an image_id that is not in the list of images", "correct it"
)
UNKNOWN_CATEGORY = Fault(
    "have a category_id that is not in the list of categories", "correct it"
)
NO_FLAG = Fault("have an iscrowd or ignore that is not 0 or 1", "write 0 or 1")
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
NO_MASK = Fault(
    "have no segmentation", "set MODEL.MASK_ON False, or add masks to the file"
)
NO_POLYGON = Fault(
    "have no polygon of three or more points, and are not learned",
    "correct or remove segmentations",
    1,
)
NO_COORDINATES = Fault(
    "have a polygon that is not a flat list of numbers up to 1e6",
    "write [x0, y0, x1, y1, ...] in pixels",
)
RUN_LENGTHS = Fault("have an RLE as segmentation", "set INPUT.MASK_FORMAT bitmask")
OTHER_SIZE = Fault(
    "have an RLE of another size than their image, or a damaged one",
    "encode the mask of the whole image",
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
ROTATED = Fault(
    "have a bbox without its rotation, which is in attributes (CVAT), and no mask",
    "export polygons or masks: turned objects lie partly outside of such a bbox",
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
MISSING_IMAGE = Fault(
    "are missing",
    "put them there, or correct file_name, which is relative to the folder of images",
)
WRONG_SIZE = Fault(
    "have another width x height",
    "correct them in the json; the size is after EXIF rotation",
)
LEFT_OUT = Fault("are not read whole", "save each part as an image of 8 bits", 1)
COPIES = Fault(
    "are copies",
    "remove one of each two; AP on images of the training is too high",
    1,
)


def describe(
    found: Mapping[Fault, Sequence[Any]],
    count: int,
    kind: str,
    report: CheckReport,
    names: str = "",
) -> None:
    """Add errors and warnings to a report that count and name the records with each fault."""
    for fault, records in found.items():
        share = len(records) / max(1, count)
        if share <= fault.warn_above:
            continue
        listed = summarize_names(map(str, records))
        messages = report.errors if share > fault.error_above else report.warnings
        messages.append(
            f"{len(records)} of {count} {kind} {fault.text} ({names}{listed}). Fix: {fault.fix}."
        )
