"""Export a whole detector, and compare its detections with the model's."""

import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn
from torchvision.ops import box_iou

from ...atomic import atomic_folder
from ...errors import ExportError
from ...norms.listing import norm_counts
from ..dataset import synthetic_images
from ..images import channels_first, evaluation_input, read_image
from .base import DetectorProgram
from .formats import PARITY, ExportedFile, check_format, write_parity, write_program
from .meta_arch import detector_program
from .one_image import OneImageProgram

_logger = logging.getLogger(__name__)

#: largest allowed differences: of a coordinate in pixels, a score, a mask's probability or share of pixels, and of
#: resized pixels, root mean square
TOLERANCES = {"boxes": 0.05, "scores": 1e-3, "masks": 0.01, "resized_pixels": 0.3}
#: allowed share of detections without counterpart: NMS may decide near ties differently after a rounding
UNMATCHED = 0.02
_SAME = 0.9  # IoU above which two boxes of a class are the same detection


def export_detector(
    model: nn.Module,
    output: str | os.PathLike[str],
    *,
    file_format: str = "pt2",
    image: Tensor | None = None,
    sides: tuple[int, int] | None = None,
    percentiles: Sequence[float] = (),
    one_image: bool = False,
    paste_masks: bool = False,
    classes: Mapping[int, str] | None = None,
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Export a Faster R-CNN, Mask R-CNN or RetinaNet with FPN, and compare its detections with the model's.

    The exported function is a :class:`.DetectorProgram`: any number of images of any size, padded to one tensor; or a
    :class:`.OneImageProgram`: one image of any size, which it resizes as evaluation does. It needs neither Detectron2
    nor this package. The folder ``output`` gets the file and ``parity.json`` (the return value), both or none.

    Args:
        model: the detector with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export in the same format.
        file_format: ``pt2`` (torch.export) or ``onnx``.
        image: pixels of 0 to 255 in the model's channel order, (3, H, W), to compare on; best with many objects.
            Default: a drawn scene.
        sides: shorter and longest side to which evaluation resizes images. With ``one_image``, the file does it; else
            ``parity.json`` names them.
        percentiles: ``INPUT.PERCENTILES``, which ``parity.json`` names: the file takes pixels that are scaled already.
        one_image: whether the file takes one image in its original size.
        paste_masks: whether masks are binary and as large as the image; only with ``one_image``.
        classes: names by category id, in the order of the detector's outputs, written into the file.
        source: origin of the weights, copied to ``parity.json``.

    Raises:
        ExportError: an argument is out of range, a part cannot be exported, or the file finds other objects.
        FileAccessError: ``output`` holds other files.
        MissingPackageError: a package that the format needs is not installed.
    """
    check_format(file_format)
    if paste_masks and not one_image:
        raise ExportError(
            "paste_masks (True): images of a batch differ in size. Fix: add one_image (--one-image)."
        )
    if one_image and sides is None:
        raise ExportError(
            "sides (None): one_image resizes inside the file. Fix: give pixels, e.g. (800, 1333)."
        )
    detector = detector_program(model, classes)
    one = (
        functools.partial(OneImageProgram, detector, sides, paste_masks)
        if one_image and sides
        else None
    )
    program = one() if one else detector
    if image is None:
        image = channels_first(
            convert_PIL_to_numpy(synthetic_images(1)[0], detector.model.input_format)
        )
    file = f"model.{file_format}"
    with atomic_folder(output, (PARITY, file)) as folder:
        _logger.info("Detecting with the model")
        resize = write_program(one(resize_only=True), folder / file) if one else None
        cases = reference_cases(program, image.detach().cpu().float(), resize)
        _logger.info("Writing %s", file)
        written = write_program(program, folder / file)
        entries = {**written.description, "norm_layers": norm_counts(model)}
        if sides is not None:
            entries["resized_in_evaluation"] = {"shorter": sides[0], "longer_at_most": sides[1]}
        if percentiles:
            entries["scaled_to_8_bits_by_percentiles"] = list(percentiles)
        if one:
            entries["compared_on"] = "the pixels that the file resizes"
        _logger.info("Comparing detections with the model's")
        entries |= check_detections(written, cases)
        return write_parity(folder / file, entries, source)


def read_image_for(
    cfg: CfgNode, path: str | os.PathLike[str], *, resize: bool = True
) -> Tensor:
    """Read an image as pixels of 0 to 255, (3, H, W); resize it as evaluation does unless ``resize`` is False."""
    pixels = read_image(path, cfg.INPUT.FORMAT, cfg.INPUT.PERCENTILES)
    return evaluation_input(pixels, cfg) if resize else channels_first(pixels)


#: images of one call, Detectron2's detections in them, and the differences of resized pixels
Case = tuple[list[Tensor], list[Instances], dict[str, float]]


def reference_cases(
    program: DetectorProgram | OneImageProgram,
    image: Tensor,
    resize: ExportedFile | None = None,
) -> list[Case]:
    """Detect with Detectron2 in an image at three sizes, and in a padded batch if the program takes one.

    Runtimes round some resized pixels differently, which moves boxes. So Detectron2 detects in the pixels of
    ``resize``, a file that only resizes, and these are compared with the model's.
    """
    smaller, larger = (
        _resize(image, scale, program.smallest_side) for scale in ((0.6, 0.8), (1.3, 1.1))
    )
    image = _resize(image, (1.0, 1.0), program.smallest_side)
    cases: list[Case] = []
    if isinstance(program, DetectorProgram):
        batches = ([image], [smaller], [larger], [image, smaller])
        cases += [(images, program.expected(images), {}) for images in batches]
    else:
        for each in (image, smaller, larger):
            own = program.resize(each)
            pixels = resize.run(each)[0] if resize else own
            rounding = {"resized_pixels": (pixels - own).square().mean().sqrt().item()}
            cases.append(([each], [program.expected(each, pixels)], rounding))
    if not any(len(found) for _, expected, _ in cases for found in expected):
        raise ExportError(
            "image: the detector finds nothing in it, so that nothing can be compared. Fix: give another image "
            "(--image), or a lower SCORE_THRESH_TEST of MODEL.ROI_HEADS or MODEL.RETINANET."
        )
    return cases


def check_detections(file: ExportedFile, cases: Iterable[Case]) -> dict[str, Any]:
    """Compare the detections of an exported file with Detectron2's.

    Detections are matched by class and IoU, as two of nearly equal score may change places.
    """
    reports: list[dict[str, Any]] = []
    for images, expected, rounding in cases:
        differences = [
            _compare(*pair) | rounding
            for pair in zip(detect(file, images), expected, strict=True)
        ]
        reports.append(
            {"sizes": [list(tensor.shape[1:]) for tensor in images], "differences": differences}
        )
    compared = [each for report in reports for each in report["differences"]]
    total, unmatched = (
        sum(each[name] for each in compared) for name in ("detections", "unmatched")
    )
    names = [name for name in TOLERANCES if name in compared[0]]
    worst = {
        name: torch.tensor([each[name] for each in compared]).max().item() for name in names
    }
    if unmatched > UNMATCHED * total:
        raise ExportError(
            f"exported file: {unmatched} detections differ from the model's {total} in number, class or place; nothing "
            "was written. Fix: try another --image, as near-equal scores can be ordered differently, or another format."
        )
    for name, value in worst.items():
        if not value <= TOLERANCES[name]:  # also for NaN
            raise ExportError(
                f"exported file: {name} differ from the model's by {value:.1e}, allowed is {TOLERANCES[name]:g}; "
                "nothing was written. Fix: export in another format."
            )
    return {
        "tolerance": {**TOLERANCES, "unmatched": UNMATCHED},
        "worst": worst,
        "detections_compared": total,
        "unmatched": unmatched,
        "cases": reports,
    }


def detect(file: ExportedFile, images: Sequence[Tensor]) -> list[Instances]:
    """Run an exported detector on images, (3, H, W): in one padded batch, or one by one, as the file takes them."""
    expected = file.description["input"]
    rows: Iterable[Sequence[Tensor]]
    with torch.no_grad():
        if expected["name"] == "images":
            rows = zip(*file.run(*_pad_batch(images, expected["smallest_side"])), strict=True)
        else:
            rows = [file.run(image) for image in images]
    named = [dict(zip(file.description["outputs"], row, strict=True)) for row in rows]
    return [
        _to_instances(image.shape[1:], outputs)
        for image, outputs in zip(images, named, strict=True)
    ]


def _pad_batch(images: Sequence[Tensor], smallest_side: int) -> tuple[Tensor, Tensor]:
    """Pad images to one tensor, (N, 3, H, W); also return their sizes, (N, 2)."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(0).clamp(min=smallest_side).tolist()
    # white padding: the file has to replace it
    pads = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    return torch.stack(
        [F.pad(image, pad, value=255.0) for image, pad in zip(images, pads, strict=True)]
    ), sizes


def _to_instances(size: Sequence[int], outputs: Mapping[str, Tensor]) -> Instances:
    """Wrap the outputs for one image; rows behind the detections are dropped."""
    count = int(outputs["count"])
    result = Instances(tuple(size))
    result.pred_boxes = Boxes(outputs["boxes"][:count])
    result.scores, result.pred_classes = outputs["scores"][:count], outputs["classes"][:count]
    if "masks" in outputs:
        masks = outputs["masks"][:count]
        result.pred_masks = (
            masks if masks.dtype == torch.bool else masks[:, None]
        )  # as Detectron2 shapes them
    return result


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
    a, b = found[rows], expected[columns]
    result = {
        "boxes": _largest(a.pred_boxes.tensor - b.pred_boxes.tensor),
        "scores": _largest(a.scores - b.scores),
        "detections": len(expected),
        "unmatched": len(found) + len(expected) - 2 * len(pairs),
    }
    if expected.has("pred_masks"):
        a, b = a.pred_masks, b.pred_masks
        pasted = b.dtype == torch.bool
        result["masks"] = (
            ((a ^ b).sum() / (a | b).sum().clamp(min=1)).item() if pasted else _largest(a - b)
        )
    return result


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item() if difference.numel() else 0.0


def _resize(image: Tensor, scale: tuple[float, float], smallest: int) -> Tensor:
    sides = [
        max(smallest, int(side * factor))
        for side, factor in zip(image.shape[1:], scale, strict=True)
    ]
    return F.interpolate(image[None], sides, mode="bilinear", antialias=True)[0]
