"""Check the records of a dataset that is registered as a Python function."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detectron2.structures import BoxMode

from ...errors import CheckReport
from .faults import Fault, describe

_TRAINED = ("file_name",)
#: of Detectron2's conversion of records to COCO, which its evaluation begins with
_EVALUATED = ("file_name", "image_id", "height", "width")
_MODES = (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS)
_SAME_ID = Fault("share their image_id", "give each record its own")
_CATEGORY = Fault(
    "have a category_id that is not an index of thing_classes",
    "count from 0, and set thing_classes in MetadataCatalog",
)
_BOX_MODE = Fault(
    "have a bbox_mode that Detectron2's mapper and COCO evaluation do not take",
    "write BoxMode.XYXY_ABS or BoxMode.XYWH_ABS, unless you have your own, as for rotated boxes",
    1,
)


def check_records(
    records: Sequence[Mapping[str, Any]],
    classes: Sequence[str] | None,
    report: CheckReport,
    *,
    evaluated: bool,
) -> None:
    """Check records in Detectron2's format for what a training would meet late or never.

    Equal ids would join the objects of several images: another AP.
    """
    if not records:
        report.errors.append(
            "no records. Fix: return one for each image, in Detectron2's format."
        )
    if not any("annotations" in record for record in records):
        return  # of segmentation, or photos to detect in
    if classes is None:
        report.errors.append("no thing_classes. Fix: set them in MetadataCatalog.")
        return

    found: dict[Fault, list[Any]] = {}
    for field in _EVALUATED if evaluated else _TRAINED:
        fault = Fault(f"have no {field}", "add it")
        found[fault] = [place for place, row in enumerate(records) if field not in row]
    if evaluated:
        found[_SAME_ID] = _repeated(row.get("image_id") for row in records)
    describe(found, len(records), "records", report, "records ")

    objects = [row for record in records for row in record.get("annotations", ())]
    categories = [row.get("category_id") for row in objects]
    modes = [row.get("bbox_mode") for row in objects]
    wrong = {
        _CATEGORY: [value for value in categories if value not in range(len(classes))],
        _BOX_MODE: [value for value in modes if value not in _MODES],
    }
    describe(wrong, len(objects), "annotations", report)


def _repeated(ids: Iterable[Any]) -> list[Any]:
    counts = Counter(number for number in ids if number is not None)
    return [number for number, count in counts.items() if count > 1]
