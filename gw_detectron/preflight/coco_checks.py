"""Check a COCO annotation file for everything that Detectron2 and pycocotools read."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from detectron2.config import CfgNode

from ..errors import DataError, summarize_names

_LARGEST_ID = 2**53  # pycocotools keeps ids in float64
_LARGEST_SIDE = 65535  # of an image in pixels
_SINGULAR = {"categories": "category", "images": "image", "annotations": "annotation"}


class Use(NamedTuple):
    """Requirements of a run on a dataset.

    Args:
        training: a dataset for evaluation needs more fields, but may lack annotations.
        masks: objects need a segmentation.
        run_lengths: a segmentation may be an RLE.
        keypoints: number of keypoints per object, 0 without keypoints.
        visible: an image with fewer visible keypoints is not trained on.
    """

    training: bool
    masks: bool = False
    run_lengths: bool = True
    keypoints: int = 0
    visible: int = 0

    @classmethod
    def in_training(cls, cfg: CfgNode) -> "Use":
        return cls.in_evaluation(cfg)._replace(
            training=True,
            run_lengths=cfg.INPUT.MASK_FORMAT != "polygon",
            visible=cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if cfg.MODEL.KEYPOINT_ON else 0,
        )

    @classmethod
    def in_evaluation(cls, cfg: CfgNode) -> "Use":
        points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0
        return cls(False, cfg.MODEL.MASK_ON, keypoints=points)


def check_coco(content: Any, use: Use) -> list[str]:
    """Check the content of a COCO file.

    Returns:
        Warnings about what Detectron2 drops or miscounts.

    Raises:
        DataError: the first wrong field.
    """
    if not isinstance(content, dict):
        raise DataError(f"{type(content).__name__} instead of an object with images, annotations and categories")
    fields = {"categories": ["id", "name"], "images": ["id", "file_name", "height", "width"]}
    if use.training or "annotations" in content:  # the official test images have no annotations
        fields["annotations"] = ["id", "image_id", "category_id", "bbox"]
        fields["annotations"] += ["segmentation"] if use.masks else []
        fields["annotations"] += ["keypoints"] if use.keypoints else []
        fields["annotations"] += [] if use.training else ["area", "iscrowd"]
        fields["annotations"] += ["num_keypoints"] if use.keypoints and not use.training else []
    for key, names in fields.items():
        if not isinstance(content.get(key), list):
            raise DataError(f"no list '{key}'")
        if not content[key] and (use.training or key != "annotations"):
            raise DataError(f"the list '{key}' is empty")
        if "segmentation" in names and content[key] and not any(map(_has_mask, content[key])):
            raise DataError("no annotation has a segmentation. Fix: set MODEL.MASK_ON False, or add masks to the file.")
        _check_fields(key, content[key], names)
    for category in content["categories"]:
        if not isinstance(category["name"], str):
            raise DataError(f"category {category['id']}: name {_short(category['name'])} is not a string")
    for image in content["images"]:
        _check_image(image)
    warnings = [
        f"{count} categories are named {_short(name)}: only one of their APs is listed. Fix: give each its own name."
        for name, count in Counter(category["name"] for category in content["categories"]).items()
        if count > 1
    ]
    return warnings + (_check_annotations(content, use) if "annotations" in fields else [])


def _has_mask(annotation: Any) -> bool:
    return isinstance(annotation, dict) and bool(annotation.get("segmentation"))


def _check_fields(kind: str, records: Sequence[Any], fields: Iterable[str]) -> None:
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{kind}[{index}] is a {type(record).__name__}, not an object")
    if lacking := [(index, record) for index, record in enumerate(records) if not set(fields) <= record.keys()]:
        index, record = lacking[0]
        # the index of a split file's part would mislead
        name = f"{_SINGULAR[kind]} {_short(record['id'])}" if "id" in record else f"{kind}[{index}]"
        others = f", and {len(lacking) - 1} more of {len(records)}" if len(lacking) > 1 else ""
        missing = " and no ".join(f"field '{key}'" for key in fields if key not in record)
        raise DataError(f"{name} has no {missing}{others}")
    wanted = str if kind == "images" and isinstance(records[0]["id"], str) else int
    for index, record in enumerate(records):
        identifier = record["id"]
        if type(identifier) is not wanted or (isinstance(identifier, int) and abs(identifier) >= _LARGEST_ID):
            raise DataError(f"{kind}[{index}]: id {_short(identifier)} is not of type {wanted.__name__}, below 2^53")
    identifier, count = Counter(record["id"] for record in records).most_common(1)[0] if records else (0, 0)
    if count > 1:
        raise DataError(f"{kind}: duplicate id {identifier!r}")


def _check_image(image: dict[str, Any]) -> None:
    for key in ("height", "width"):
        if type(image[key]) is not int or not 1 <= image[key] <= _LARGEST_SIDE:
            raise DataError(f"image {image['id']}: {key} {_short(image[key])} is not a positive integer up to 65535")
    name = image["file_name"]
    if not isinstance(name, str) or not name or "\0" in name:
        raise DataError(f"image {image['id']}: file_name {_short(name)} is not the name of a file")


def _check_annotations(content: dict[str, Any], use: Use) -> list[str]:
    images = {image["id"]: image for image in content["images"]}
    categories = {category["id"] for category in content["categories"]}
    dropped: dict[str, list[str]] = defaultdict(list)
    trainable = 0
    visible: dict[Any, int] = defaultdict(int)  # image id -> keypoints
    for annotation in content["annotations"]:
        for problem in _problems(annotation, images, categories, use):
            raise DataError(f"annotation {annotation['id']}: {problem}")
    _check_box_format(content["annotations"], images)
    for annotation in content["annotations"]:
        if annotation.get("iscrowd", 0):
            continue
        reason = _reason_to_drop(annotation, images[annotation["image_id"]])
        if reason:
            dropped[reason].append(str(annotation["id"]))
            continue
        trainable += 1
        visible[annotation["image_id"]] += sum(value > 0 for value in (annotation.get("keypoints") or ())[2::3])
    if use.training and not trainable:
        reasons = ", or ".join(["crowds", *dropped])
        raise DataError(f"all annotations are {reasons}, so there is nothing to learn from")
    if use.visible > (most := max(visible.values(), default=0)):
        raise DataError(
            f"no image has more than {most} visible keypoints, fewer than MODEL.ROI_KEYPOINT_HEAD."
            f"MIN_KEYPOINTS_PER_IMAGE ({use.visible}), so none is trained on. Fix: correct the visibilities, lower "
            "this key, or set MODEL.KEYPOINT_ON False."
        )
    warnings = [
        f"{len(ids)} objects are {reason} (ids {summarize_names(ids)}); "
        + ("they are not trained on." if use.training else "no detection can match their boxes.")
        + " Fix: correct or remove them."
        for reason, ids in dropped.items()
        if use.training or "box" in reason
    ]
    if not use.training and any(annotation["id"] == 0 for annotation in content["annotations"]):
        warnings.append("annotation 0: pycocotools counts its match as a miss. Fix: number the annotations from 1.")
    return warnings


def _check_box_format(annotations: Sequence[dict[str, Any]], images: dict) -> None:
    """Raise DataError if most boxes look like two corners, or normalized by the size of the image.

    Two corners leave their image as x, y, width, height, but fit into it as x1, y1, x2, y2.
    """
    corners = normalized = 0
    for annotation in annotations:
        (x, y, a, b), image = annotation["bbox"], images[annotation["image_id"]]
        leaves = x + a > image["width"] + 1 or y + b > image["height"] + 1  # one pixel: rounding
        corners += leaves and x < a <= image["width"] + 1 and y < b <= image["height"] + 1
        normalized += max(annotation["bbox"]) <= 1
    if 2 * corners > len(annotations):
        raise DataError(
            f"{corners} of {len(annotations)} boxes leave their image: bbox looks like x1 y1 x2 y2. Fix: write it as "
            "x, y, width, height."
        )
    if 2 * normalized > len(annotations):
        raise DataError(
            f"{normalized} of {len(annotations)} boxes have no number above 1: bbox looks normalized by the size of "
            "the image. Fix: write x, y, width, height in pixels."
        )


def _problems(annotation: dict[str, Any], images: dict, categories: set, use: Use) -> Iterator[str]:
    """Yield errors at which Detectron2 or pycocotools fail or miscompute."""
    for key, known, kind in (("image_id", images, "images"), ("category_id", categories, "categories")):
        value = annotation[key]
        if type(value) not in (int, str) or value not in known:
            yield f"{key} {_short(value)} is not the id of one of the {kind}: {summarize_names(map(repr, known), 9)}"
    if not _are_numbers(annotation["bbox"], 4):
        yield f"bbox {_short(annotation['bbox'])} is not four numbers (x, y, width, height)"
    if not use.training and not _are_numbers([annotation["area"]], 1):
        yield f"area {_short(annotation['area'])} is not a number"
    for key, allowed in (("iscrowd", (0, 1)), ("ignore", (0,))):
        if annotation.get(key, 0) not in allowed:
            yield f"{key} {_short(annotation[key])} is not {' or '.join(map(str, allowed))}"
    if keypoints := annotation.get("keypoints"):
        wanted = 3 * use.keypoints
        if not _are_numbers(keypoints, wanted or None) or len(keypoints) % 3:
            yield f"keypoints {_short(keypoints)} are not {wanted or 'triples of'} numbers (x, y, visibility)"
    mask, crowd = annotation.get("segmentation"), annotation.get("iscrowd", 0)
    if isinstance(mask, dict):
        image, pixels = images[annotation["image_id"]], _pixels(mask.get("counts"))
        if not _are_numbers(mask.get("size"), 2, int) or math.isnan(pixels):
            yield "segmentation is not an RLE with size and counts"
        elif use.masks and mask["size"] != [image["height"], image["width"]]:
            yield f"segmentation: size {_short(mask['size'])} is not the image's height and width"
        elif use.masks and pixels != image["height"] * image["width"]:
            yield "segmentation: the counts of the RLE do not add up to the pixels of the image"
        elif use.masks and not use.run_lengths and not crowd:
            yield "segmentation is an RLE, which needs INPUT.MASK_FORMAT bitmask"
    elif mask:
        if not (isinstance(mask, list) and all(_are_numbers(polygon) for polygon in mask)):
            yield f"segmentation {_short(mask)} is neither a list of polygons nor an RLE"
        elif use.masks and not use.training and not all(_is_polygon(polygon) for polygon in mask):
            yield "segmentation has a polygon that is not at least three points"
    elif use.masks and not (crowd and use.training):
        yield f"segmentation {_short(mask)} is empty"


def _reason_to_drop(annotation: dict[str, Any], image: dict[str, Any]) -> str:
    """Tell why Detectron2 does not train on an object, or return ""."""
    mask = annotation.get("segmentation")
    if isinstance(mask, list) and mask and not any(map(_is_polygon, mask)):
        return "without a polygon of at least three points"
    x, y, width, height = annotation["bbox"]
    if width <= 0 or height <= 0:
        return "boxes without area"
    if min(x + width, image["width"]) <= max(x, 0) or min(y + height, image["height"]) <= max(y, 0):
        return "boxes outside of their image"
    return ""


def _is_polygon(points: Sequence[float]) -> bool:
    return len(points) >= 6 and len(points) % 2 == 0


def _are_numbers(values: Any, count: int | None = None, kind: type = float) -> bool:
    """Tell whether a value is a list of ``count`` numbers below 1e9."""
    return (
        isinstance(values, list)
        and (count is None or len(values) == count)
        and all(type(value) in (int, kind) and abs(value) < 1e9 for value in values)
    )


def _pixels(counts: Any) -> float:
    """Sum the run lengths of an RLE; NaN if it is malformed.

    pycocotools decodes a sum that is too small to random pixels.
    Source: rleFrString in maskApi.c of pycocotools.
    """
    if isinstance(counts, list):
        return sum(counts) if _are_numbers(counts, kind=int) and min(counts, default=-1) >= 0 else math.nan
    runs: list[int] = []
    value = shift = 0
    for code in counts.encode() if isinstance(counts, str) else b"":
        if not 48 <= code < 112 or shift > 30:
            return math.nan
        value |= (code - 48 & 31) << shift
        shift += 5
        if not code - 48 & 32:
            if code - 48 & 16:
                value -= 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return sum(runs) if runs and not shift and min(runs) >= 0 else math.nan


def _short(value: Any) -> str:
    """Print a value in at most 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or deep nesting
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
