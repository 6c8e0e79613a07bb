"""Export a whole detector and check what it finds."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from ..data.images import evaluation_input, read_image, synthetic_images
from .atomic_folder import atomic_folder
from .detection import (
    DetectorProgram,
    EvaluationImages,
    RCNNProgram,
    RetinaNetProgram,
    check_detections,
    check_supported,
    compare_accuracy,
)
from .formats import write_onnx, write_pt2, write_torchscript
from .parity import ExportError
from .report import REPORT_FILES, write_report

#: format -> file name and writer
DETECTOR_FORMATS = {
    "pt2": ("model.pt2", write_pt2),
    "onnx": ("model.onnx", write_onnx),
    "torchscript": ("model.ts", write_torchscript),
}


def export_detector(
    model: nn.Module,
    output: str | os.PathLike[str],
    *,
    file_format: str = "pt2",
    detections: int | None = None,
    image: Tensor | None = None,
    evaluation: EvaluationImages | None = None,
    sides: tuple[int, int] | None = None,
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Export a Faster R-CNN, Mask R-CNN or RetinaNet with FPN, and compare its detections with the model's.

    The exported function is that of :class:`.DetectorProgram`: any number of images of any size, padded to one tensor.
    It needs neither Detectron2 nor this package. The folder ``output`` gets the file, ``parity.json`` (the return
    value) and ``README.md`` (code that loads the file), all or none.

    Args:
        model: the detector with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export in the same format.
        file_format: ``pt2`` (torch.export), ``onnx`` or ``torchscript`` (a trace; deprecated in torch).
        detections: rows of an image, by default ``TEST.DETECTIONS_PER_IMAGE`` of the model.
        image: pixels of 0 to 255 in the model's channel order, (3, H, W), best with many objects, for the comparison.
            A drawn scene by default.
        evaluation: annotated images, of which the AP of model and file is computed.
        sides: shorter and longest side to which evaluation resizes images, for ``README.md``. The file does not resize.
        source: origin of the weights, copied to ``parity.json``.

    Raises:
        ExportError: an argument is out of range, or a part of the detector cannot be exported.
        ParityError: the file finds something else than the model.
        OutputFolderError: ``output`` holds other files.
        MissingPackageError: a package that the format needs is not installed.
    """
    if file_format not in DETECTOR_FORMATS:
        raise ExportError(f"file_format ({file_format!r}): unknown. Fix: use one of {', '.join(DETECTOR_FORMATS)}.")
    program = detector_program(model, detections)
    image = _scene(program.model.input_format) if image is None else image.detach().cpu().float()
    if image.dim() != 3 or image.shape[0] != 3:
        raise ExportError(f"image ({tuple(image.shape)}): expected the shape (3, H, W). Fix: give one color image.")
    file, write = DETECTOR_FORMATS[file_format]
    with atomic_folder(output, (file, *REPORT_FILES)) as folder:
        run, entries = write(program, folder / file)
        entries |= program.describe()
        entries["resized_in_evaluation"] = None if sides is None else {"shorter": sides[0], "longer_at_most": sides[1]}
        entries |= check_detections(program, run, image)
        if evaluation is not None:
            entries["accuracy"] = compare_accuracy(program, run, evaluation)
        return write_report(folder / file, file_format, file_format, entries, source)


def detector_program(model: nn.Module, detections: int | None = None) -> DetectorProgram:
    """Return a detector as a function of tensors.

    Raises:
        ExportError: a part of the detector cannot be exported, or the number of detections is below 1.
    """
    check_supported(model)
    program = RCNNProgram if isinstance(model, GeneralizedRCNN) else RetinaNetProgram
    return program(model, detections)


def read_image_for(cfg: CfgNode, path: str | os.PathLike[str]) -> Tensor:
    """Read an image as Detectron2 gives it to the model in evaluation.

    Returns:
        Pixels of 0 to 255, (3, H, W), resized by ``INPUT.MIN_SIZE_TEST`` and ``MAX_SIZE_TEST``.

    Raises:
        MissingFileError, DataError: the image cannot be read.
    """
    return evaluation_input(read_image(path, cfg.INPUT.FORMAT), cfg)


def _scene(channels: str) -> Tensor:
    image = torch.from_numpy(np.array(synthetic_images(1)[0])).permute(2, 0, 1).float()
    return image.flip(0) if channels == "BGR" else image
