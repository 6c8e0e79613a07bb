"""Parity check of detectors: the exported file finds what the model finds."""

from typing import Any

import torch
import torch.nn.functional as F
from detectron2.structures import Instances
from torch import Tensor
from torchvision.ops import box_iou

from ...errors import ExportError, ParityError
from ..exported_file import ExportedFile
from .calling import detect
from .one_image import OneImageProgram
from .program import DetectorProgram

#: largest allowed differences: of a coordinate in pixels, a score, and a mask's probability or share of pixels
TOLERANCES = {"boxes": 0.05, "scores": 1e-3, "masks": 0.01}
#: allowed share of detections without counterpart: NMS may decide near ties differently after a rounding
UNMATCHED = 0.02
_SAME = 0.9  # IoU above which two boxes of a class are the same detection


def check_detections(program: DetectorProgram | OneImageProgram, file: ExportedFile, image: Tensor) -> dict[str, Any]:
    """Compare the detections of an exported file with those of Detectron2's own inference.

    Detections are matched by class and IoU, as two of nearly equal score may change places. The cases are the image at
    three sizes; the surroundings of its best detection; a padded batch of two sizes, if the program takes one; and a
    black image, if the model finds nothing in it. The model runs the reference backend, which is the exported one.

    Args:
        program: the model.
        file: the exported file.
        image: pixels in the model's channel order, (3, H, W).

    Returns:
        ``cases``, with sizes and differences; ``worst``, the largest differences; ``unmatched``, the number of
        detections without counterpart; ``tolerance``.

    Raises:
        ExportError: the model finds nothing in the image.
        ParityError: a difference is above :data:`TOLERANCES`, or more than :data:`UNMATCHED` have no counterpart.
    """
    smaller, larger = (_resize(image, scale, program.smallest_side) for scale in ((0.6, 0.8), (1.3, 1.1)))
    image = _resize(image, (1.0, 1.0), program.smallest_side)
    batches = [[image], [smaller], [larger], [_surroundings(program, image)]]
    if program.takes_batches:
        batches.append([image, smaller])
    black = torch.zeros_like(image)
    if not len(program.expected([black])[0]):  # else boxes of equal score are in no order
        batches.append([black])
    cases, compared = [], []
    for images in batches:
        expected = program.expected(images)
        found = detect(file, images)
        differences = [_compare(a, b) for a, b in zip(found, expected, strict=True)]
        compared += differences
        sizes = [list(tensor.shape[1:]) for tensor in images]
        cases.append({"sizes": sizes, "differences": differences})
    total, unmatched = (sum(each[name] for each in compared) for name in ("detections", "unmatched"))
    if not total:
        raise ExportError(
            "image: the detector finds nothing in it, so that nothing can be compared. "
            "Fix: give another image (--image), or a lower MODEL.ROI_HEADS.SCORE_THRESH_TEST, for RetinaNet "
            "MODEL.RETINANET.SCORE_THRESH_TEST."
        )
    names = [name for name in TOLERANCES if name in program.names]
    worst = {name: torch.tensor([each[name] for each in compared]).max().item() for name in names}
    if unmatched > UNMATCHED * max(1, total):
        raise ParityError(
            f"exported file: {unmatched} detections differ from the model's {total} in number, class or place; nothing "
            "was written. Fix: export in another format, or give an --image whose detections do not nearly tie."
        )
    for name, value in worst.items():
        if not value <= TOLERANCES[name]:  # also for NaN
            raise ParityError(
                f"exported file: {name} differ from the model's by {value:.1e}, allowed is {TOLERANCES[name]:g}; "
                "nothing was written. Fix: export in another format."
            )
    tolerance = {**{name: TOLERANCES[name] for name in worst}, "unmatched": UNMATCHED}
    return {
        "tolerance": tolerance,
        "worst": worst,
        "detections_compared": total,
        "unmatched": unmatched,
        "cases": cases,
    }


def _compare(found: Instances, expected: Instances) -> dict[str, Any]:
    """Match detections one to one; return the largest differences and the number of those left over."""
    same_class = found.pred_classes[:, None] == expected.pred_classes
    overlap = box_iou(found.pred_boxes.tensor, expected.pred_boxes.tensor) * same_class
    pairs: list[tuple[int, int]] = []
    while overlap.numel() and overlap.max() > _SAME:
        row, column = divmod(int(overlap.argmax()), overlap.shape[1])
        pairs.append((row, column))
        overlap[row], overlap[:, column] = 0, 0
    rows, columns = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    found_pairs, expected_pairs = found[rows], expected[columns]
    result = {
        "boxes": _largest(found_pairs.pred_boxes.tensor - expected_pairs.pred_boxes.tensor),
        "scores": _largest(found_pairs.scores - expected_pairs.scores),
    }
    if expected.has("pred_masks"):
        result["masks"] = _mask_difference(found_pairs.pred_masks, expected_pairs.pred_masks)
    return {**result, "detections": len(expected), "unmatched": len(found) + len(expected) - 2 * len(pairs)}


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0


def _mask_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a probability; of pasted masks, the share of their pixels that differ."""
    if expected.dtype != torch.bool:
        return _largest(found - expected)
    return ((found ^ expected).sum() / (found | expected).sum().clamp(min=1)).item()


def _resize(image: Tensor, scale: tuple[float, float], smallest: int) -> Tensor:
    sides = [max(smallest, int(side * factor)) for side, factor in zip(image.shape[1:], scale, strict=True)]
    return F.interpolate(image[None], sides, mode="bilinear", antialias=True)[0]


def _surroundings(program: DetectorProgram | OneImageProgram, image: Tensor) -> Tensor:
    """Cut out the best detection, with a margin of half its size, where few others are."""
    boxes = program.expected([image])[0].pred_boxes.tensor
    if not len(boxes):
        return image
    box = boxes[0]
    margin = (box[2:] - box[:2]) / 2
    x0, y0, x1, y1 = torch.cat((box[:2] - margin, box[2:] + margin + 1)).clamp(min=0).int().tolist()
    return _resize(image[:, y0:y1, x0:x1], (1.0, 1.0), program.smallest_side)
