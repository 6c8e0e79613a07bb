"""Export a whole detector, and compare its detections with the model's."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor, nn
from torchvision.ops import box_iou

from ...atomic import atomic_folder
from ...errors import ExportError
from ...norms.listing import norm_counts
from ..images import channels_first, evaluation_input, read_image
from ..images.samples import sample_image
from .base import DetectorProgram
from .formats import PARITY, ExportedFile, write_parity, write_program
from .meta_arch import detector_program
from .one_image import OneImageProgram, ResizeProgram

_logger = logging.getLogger(__name__)

#: largest allowed differences: of a coordinate in pixels, a score, a mask's probability or share
#: of pixels, and of resized pixels, root mean square
TOLERANCES = {"boxes": 0.05, "scores": 1e-3, "masks": 0.01, "resized_pixels": 0.3}
#: allowed share of detections without counterpart: NMS may decide near ties differently after a
#: rounding
UNMATCHED = 0.02
_SAME = 0.9  # IoU above which two boxes of a class are the same detection


def export_detector(
    model: nn.Module,
    output: str | os.PathLike[str],
    *,
    sides: tuple[int, int],
    file_format: str = "pt2",
    image: Tensor | None = None,
    percentiles: Sequence[float] = (),
    one_image: bool = False,
    paste_masks: bool = False,
    classes: Mapping[int, str] | None = None,
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Export a detector with FPN, and compare its detections with the model's.

    It is a Faster R-CNN, Mask R-CNN or RetinaNet.
    The exported function is a :class:`.DetectorProgram`: any number of images of any size, padded
    to one tensor; or a :class:`.OneImageProgram`: one image of any size, which it resizes as
    evaluation does. It needs neither Detectron2 nor this package. The folder ``output`` gets the
    file and ``parity.json`` (the return value), both or none.

    Args:
        model: the detector with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export in
            the same format.
        sides: shorter and longest side to which evaluation resizes images; a shorter side of 0
            means no resizing. With ``one_image``, the file does it; else ``parity.json`` names them.
        file_format: ``pt2`` (torch.export) or ``onnx``.
        image: pixels of 0 to 255 in the model's channel order, (3, H, W), to compare on; best
            with many objects. Default: a drawn scene.
        percentiles: ``INPUT.PERCENTILES``, which ``parity.json`` names: the file takes pixels
            that are scaled already.
        one_image: whether the file takes one image in its original size.
        paste_masks: whether masks are binary and as large as the image; only with ``one_image``.
        classes: names by category id, in the order of the detector's outputs, written into the
            file.
        source: origin of the weights, copied to ``parity.json``.

    Raises:
        ExportError: an argument is out of range, a part cannot be exported, or the file finds
        other objects.
        FileAccessError: ``output`` holds other files.
        MissingPackageError: a package that the format needs is not installed.
    """
    if paste_masks and not one_image:
        raise ExportError(
            "paste_masks (True): images of a batch differ in size. Fix: add one_image "
            "(--one-image)."
        )
    detector = detector_program(model, classes)
    program: DetectorProgram | OneImageProgram = detector
    resizing = None
    if one_image:
        resizing = ResizeProgram(detector, sides)
        program = OneImageProgram(detector, sides, paste_masks)
    if image is None:
        scene = convert_PIL_to_numpy(sample_image(), detector.model.input_format)
        image = channels_first(scene)
    file = f"model.{file_format}"
    with atomic_folder(output, (PARITY, file)) as folder:
        _logger.info("Detecting with the model")
        resize = write_program(resizing, folder / file) if resizing else None
        cases = reference_cases(program, image.detach().cpu().float(), resize)

        _logger.info("Writing %s", file)
        written = write_program(program, folder / file)
        report = {**written.description, "norm_layers": norm_counts(model)}
        resized = {"shorter": sides[0], "longer_at_most": sides[1]}
        report["resized_in_evaluation"] = resized
        if percentiles:
            report["scaled_to_8_bits_by_percentiles"] = list(percentiles)
        if one_image:
            report["compared_on"] = "the pixels that the file resizes"

        _logger.info("Comparing detections with the model's")
        report |= check_detections(written, cases)
        return write_parity(folder / file, report, source)


def read_image_for(
    cfg: CfgNode, path: str | os.PathLike[str], *, resize: bool = True
) -> Tensor:
    """Read an image as pixels of 0 to 255, (3, H, W).

    ``resize``: resize it as evaluation does.
    """
    pixels = read_image(path, cfg.INPUT.FORMAT, cfg.INPUT.PERCENTILES)
    return evaluation_input(pixels, cfg) if resize else channels_first(pixels)


@dataclass
class Case:
    """Images of one call, and Detectron2's detections in them."""

    images: list[Tensor]
    expected: list[Instances]
    # differences of resized pixels
    rounding: dict[str, float] = field(default_factory=dict)


def reference_cases(
    program: DetectorProgram | OneImageProgram,
    image: Tensor,
    resize: ExportedFile | None = None,
) -> list[Case]:
    """Detect with Detectron2 in an image at three sizes.

    If the program takes batches, also in a padded one. Runtimes round some resized pixels
    differently, which moves boxes. So Detectron2 detects in the pixels of ``resize``, a file that
    only resizes, and these are compared with the model's.
    """
    scales = ((1.0, 1.0), (0.6, 0.8), (1.3, 1.1))
    images = [_resize(image, scale, program.smallest_side) for scale in scales]
    if isinstance(program, DetectorProgram):
        batches = [[image] for image in images]
        batches.append(images[:2])
        cases = [Case(batch, program.expected(batch)) for batch in batches]
    else:
        cases = [_case_of_one(program, image, resize) for image in images]

    numbers = [len(instances) for case in cases for instances in case.expected]
    if not any(numbers):
        raise ExportError(
            "image: the detector finds nothing in it, so that nothing can be compared. Fix: give "
            "another image (--image), or a lower SCORE_THRESH_TEST of MODEL.ROI_HEADS or "
            "MODEL.RETINANET."
        )
    return cases


def _case_of_one(
    program: OneImageProgram, image: Tensor, resize: ExportedFile | None
) -> Case:
    own = program.resize(image)
    pixels = resize.run(image)[0] if resize else own
    rounding = (pixels - own).square().mean().sqrt().item()
    expected = program.expected(image, pixels)
    return Case([image], [expected], {"resized_pixels": rounding})


def check_detections(file: ExportedFile, cases: Iterable[Case]) -> dict[str, Any]:
    """Compare the detections of an exported file with Detectron2's.

    Detections are matched by class and IoU, as two of nearly equal score may change places.
    """
    reports: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    for case in cases:
        pairs = zip(detect(file, case.images), case.expected, strict=True)
        differences = [
            _compare(found, expected) | case.rounding for found, expected in pairs
        ]
        sizes = [list(image.shape[1:]) for image in case.images]
        reports.append({"sizes": sizes, "differences": differences})
        compared += differences

    total = sum(differences["detections"] for differences in compared)
    unmatched = sum(differences["unmatched"] for differences in compared)
    if unmatched > UNMATCHED * total:
        raise ExportError(
            f"exported file: {unmatched} detections differ from the model's {total} in number, "
            "class or place; nothing was written. Fix: try another --image, as near-equal scores "
            "can be ordered differently, or another format."
        )

    worst = {}
    for name in TOLERANCES.keys() & compared[0].keys():
        values = torch.tensor([differences[name] for differences in compared])
        value = values.max().item()  # NaN if one is
        if not value <= TOLERANCES[name]:  # also for NaN
            raise ExportError(
                f"exported file: {name} differ from the model's by {value:.1e}, allowed is "
                f"{TOLERANCES[name]:g}; nothing was written. Fix: export in another format."
            )
        worst[name] = value
    return {
        "tolerance": {**TOLERANCES, "unmatched": UNMATCHED},
        "worst": worst,
        "detections_compared": total,
        "unmatched": unmatched,
        "cases": reports,
    }


def detect(file: ExportedFile, images: Sequence[Tensor]) -> list[Instances]:
    """Run an exported detector on images, (3, H, W), in one padded batch if it takes one."""
    rows: Iterable[Sequence[Tensor]]
    with torch.no_grad():
        if file.description["input"]["name"] == "images":
            # white padding: the file has to replace it
            batch = ImageList.from_tensors(list(images), pad_value=255.0)
            sizes = torch.tensor(batch.image_sizes)
            rows = zip(*file.run(batch.tensor, sizes), strict=True)
        else:
            rows = [file.run(image) for image in images]

    instances = []
    for image, row in zip(images, rows, strict=True):
        outputs = dict(zip(file.description["outputs"], row, strict=True))
        instances.append(_to_instances(image.shape[1:], outputs))
    return instances


def _to_instances(size: Sequence[int], outputs: Mapping[str, Tensor]) -> Instances:
    """Wrap the outputs for one image; rows behind the detections are dropped."""
    count = int(outputs["count"])
    result = Instances(tuple(size))
    result.pred_boxes = Boxes(outputs["boxes"][:count])
    result.scores = outputs["scores"][:count]
    result.pred_classes = outputs["classes"][:count]
    if "masks" in outputs:
        masks = outputs["masks"][:count]
        is_pasted = masks.dtype == torch.bool
        # as Detectron2 shapes them
        result.pred_masks = masks if is_pasted else masks[:, None]
    return result


def _compare(found: Instances, expected: Instances) -> dict[str, Any]:
    """Match detections of a class by IoU.

    Returns:
        the largest differences, and the number of detections without a match.
    """
    is_same_class = found.pred_classes[:, None] == expected.pred_classes
    iou = box_iou(found.pred_boxes.tensor, expected.pred_boxes.tensor)
    is_match = is_same_class & (iou > _SAME)  # one to one after NMS
    matched = [int(is_match.any(dim).sum()) for dim in (0, 1)]

    rows, columns = is_match.nonzero(as_tuple=True)
    a, b = found[rows], expected[columns]
    result = {
        "boxes": _largest(a.pred_boxes.tensor - b.pred_boxes.tensor),
        "scores": _largest(a.scores - b.scores),
        "detections": len(expected),
        "unmatched": len(found) + len(expected) - 2 * min(matched),
    }
    if expected.has("pred_masks"):
        result["masks"] = _difference_of_masks(a.pred_masks, b.pred_masks)
    return result


def _difference_of_masks(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of probabilities, or the share of pixels of pasted masks."""
    if a.dtype != torch.bool:
        return _largest(a - b)
    union = (a | b).sum().clamp(min=1)
    return float((a ^ b).sum() / union)


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def _resize(image: Tensor, scale: tuple[float, float], smallest: int) -> Tensor:
    pairs = zip(image.shape[1:], scale, strict=True)
    sides = [max(smallest, int(side * factor)) for side, factor in pairs]
    return F.interpolate(image[None], sides, mode="bilinear", antialias=True)[0]
