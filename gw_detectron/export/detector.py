"""Export a whole detector and check what it finds."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.modeling import GeneralizedRCNN
from torch import Tensor, nn

from ..atomic import atomic_folder
from ..data.class_metadata import class_metadata
from ..data.images import channels_first, evaluation_input, read_image, synthetic_images
from ..errors import ExportError
from ..norms.norm_listing import norm_counts
from ..progress import steps
from .detection import (
    DetectorProgram,
    EvaluationImages,
    OneImageProgram,
    RCNNProgram,
    RetinaNetProgram,
    check_detections,
    check_supported,
    compare_accuracy,
)
from .formats import write_onnx, write_pt2, write_torchscript
from .parity_files import REPORT_FILES, write_parity_files

#: format -> file name and writer
DETECTOR_FORMATS = {
    "pt2": ("model.pt2", write_pt2),
    "onnx": ("model.onnx", write_onnx),
    "torchscript": ("model.ts", write_torchscript),
}
_CANDIDATES = 8  # images, of which the one with the most detections is compared


def export_detector(
    model: nn.Module,
    output: str | os.PathLike[str],
    *,
    file_format: str = "pt2",
    detections: int | None = None,
    image: Tensor | None = None,
    evaluation: EvaluationImages | None = None,
    sides: tuple[int, int] | None = None,
    one_image: bool = False,
    paste_masks: bool = False,
    class_names: Sequence[str] | None = None,
    category_ids: Sequence[int] | None = None,
    source: Mapping[str, str] | None = None,
    card: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Export a Faster R-CNN, Mask R-CNN or RetinaNet with FPN, and compare its detections with the model's.

    The exported function is that of :class:`.DetectorProgram`: any number of images of any size, padded to one tensor;
    or that of :class:`.OneImageProgram`: one image of any size, which it resizes as evaluation does. It needs neither
    Detectron2 nor this package. The folder ``output`` gets the file, ``parity.json`` (the return value) and
    ``README.md`` (code that loads the file), all or none.

    Args:
        model: the detector with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export in the same format.
        file_format: ``pt2`` (torch.export), ``onnx`` or ``torchscript`` (a trace; deprecated in torch).
        detections: rows of an image, by default ``TEST.DETECTIONS_PER_IMAGE`` of the model.
        image: pixels of 0 to 255 in the model's channel order, (3, H, W), best with many objects, for the comparison.
            By default a drawn scene, or that of the first images of ``evaluation`` with more detections.
        evaluation: annotated images, of which the AP of model and file is computed.
        sides: shorter and longest side to which evaluation resizes images. With ``one_image``, the file does it; else
            ``README.md`` names them.
        one_image: whether the file takes one image in its original size; not for ``torchscript``.
        paste_masks: whether masks are binary and as large as the image; with ``one_image`` alone.
        class_names: names of the classes, written into the file.
        category_ids: ids of the classes in annotation files, written into the file.
        source: origin of the weights, copied to ``parity.json``.
        card: the result of :func:`.card_facts`: ``README.md`` becomes a model card.

    Raises:
        ExportError: an argument is out of range, or a part of the detector cannot be exported.
        ParityError: the file finds something else than the model.
        OutputFolderError: ``output`` holds other files.
        MissingPackageError: a package that the format needs is not installed.
    """
    if file_format not in DETECTOR_FORMATS:
        raise ExportError(f"file_format ({file_format!r}): unknown. Fix: use one of {', '.join(DETECTOR_FORMATS)}.")
    _check_one_image(file_format, one_image, paste_masks, sides)
    detector = detector_program(model, detections, class_names, category_ids)
    program = OneImageProgram(detector, sides, paste_masks) if one_image and sides else detector
    image = _comparison_image(detector, program, evaluation) if image is None else image.detach().cpu().float()
    if image.dim() != 3 or image.shape[0] != 3:
        raise ExportError(f"image ({tuple(image.shape)}): expected the shape (3, H, W). Fix: give one color image.")
    file, write = DETECTOR_FORMATS[file_format]
    with steps(3 if evaluation else 2) as begin, atomic_folder(output, (file, *REPORT_FILES)) as folder:
        begin(f"writing {file}")
        written, entries = write(program, folder / file)
        entries |= {**written.description, "norm_layers": norm_counts(model)}
        if sides is not None:
            entries["resized_in_evaluation"] = {"shorter": sides[0], "longer_at_most": sides[1]}
        begin("comparing detections with the model's")
        entries |= check_detections(program, written, image)
        if evaluation is not None:
            begin(f"computing AP on {len(evaluation.inputs)} images, twice")
            entries["accuracy"] = compare_accuracy(detector, program, written, evaluation)
        return write_parity_files(folder / file, file_format, entries, source, card)


def detector_program(
    model: nn.Module,
    detections: int | None = None,
    class_names: Sequence[str] | None = None,
    category_ids: Sequence[int] | None = None,
) -> DetectorProgram:
    """Return a detector as a function of tensors.

    Raises:
        ExportError: a part of the detector cannot be exported, the number of detections is below 1, or that of names
            is not the number of classes or of ids.
    """
    check_supported(model)
    program = RCNNProgram if isinstance(model, GeneralizedRCNN) else RetinaNetProgram
    return program(model, detections, class_names, category_ids)


def dataset_classes(cfg: CfgNode, config_file: str | None = None) -> tuple[list[str] | None, list[int] | None]:
    """Return names and annotation ids of the config's classes; None if unknown, see :func:`class_metadata`."""
    metadata = class_metadata(cfg, config_file)
    names, indices = (metadata.get(key, None) for key in ("thing_classes", "thing_dataset_id_to_contiguous_id"))
    ids = None if indices is None else sorted(indices, key=lambda number: indices[number])
    return None if names is None else list(names), ids


def _check_one_image(file_format: str, one_image: bool, paste_masks: bool, sides: tuple[int, int] | None) -> None:
    if paste_masks and not one_image:
        raise ExportError("paste_masks (True): images of a batch differ in size. Fix: add one_image (--one-image).")
    if one_image and file_format == "torchscript":
        raise ExportError("one_image (True): a TorchScript trace has one size to resize to. Fix: use pt2 or onnx.")
    if one_image and sides is None:
        raise ExportError("sides (None): one_image resizes inside the file. Fix: give pixels, e.g. (800, 1333).")


def read_image_for(cfg: CfgNode, path: str | os.PathLike[str], *, resize: bool = True) -> Tensor:
    """Read an image as Detectron2 gives it to the model in evaluation.

    Args:
        cfg: the config.
        path: of the image.
        resize: whether to resize it by ``INPUT.MIN_SIZE_TEST`` and ``MAX_SIZE_TEST``.

    Returns:
        Pixels of 0 to 255, (3, H, W).

    Raises:
        MissingFileError, DataError: the image cannot be read.
    """
    pixels = read_image(path, cfg.INPUT.FORMAT)
    return evaluation_input(pixels, cfg) if resize else channels_first(pixels)


def _comparison_image(
    detector: DetectorProgram, program: DetectorProgram | OneImageProgram, evaluation: EvaluationImages | None
) -> Tensor:
    images = [channels_first(convert_PIL_to_numpy(synthetic_images(1)[0], detector.model.input_format))]
    if evaluation is None:
        return images[0]
    images += [program.evaluation_image(item).float() for item in evaluation.inputs[:_CANDIDATES]]
    return max(images, key=lambda image: len(program.expected([image])[0]))
