"""Export a backbone, with or without FPN."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from detectron2.modeling import FPN, Backbone

from ..atomic import atomic_folder
from ..errors import ExportError
from ..norms.norm_listing import norm_counts
from ..progress import steps
from .feature_extractor import FeatureExtractor, Normalization
from .formats import Written, write_onnx, write_pt2, write_torchscript
from .parity import TOLERANCE, check_parity, worst_relative
from .parity_files import REPORT_FILES, write_parity_files
from .safetensors_writer import LAYOUTS, write_safetensors

#: format -> file name and writer
FORMATS: dict[str, tuple[str, Callable[..., Written]]] = {
    "pt2": ("backbone.pt2", write_pt2),
    "onnx": ("backbone.onnx", write_onnx),
    "torchscript": ("backbone.ts", write_torchscript),
    "safetensors": ("backbone.safetensors", write_safetensors),
}


def export_backbone(
    backbone: Backbone,
    output: str | os.PathLike[str],
    normalization: Normalization,
    *,
    file_format: str = "pt2",
    fpn: bool | None = None,
    layout: str = "detectron2",
    source: Mapping[str, str] | None = None,
    card: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Export a backbone and check the numbers of the exported file.

    The exported function takes one image tensor and returns a tuple of feature maps. The folder ``output`` gets three
    files, all or none: the exported file, ``parity.json`` (the return value) and ``README.md`` (code that loads the
    file).

    Args:
        backbone: a Detectron2 backbone with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export in the same format, which
            is replaced.
        normalization: how images become the backbone's input, and whether the exported function does it.
        file_format: ``pt2`` (torch.export), ``onnx``, ``torchscript`` (a trace; deprecated in torch) or
            ``safetensors`` (weights only). The first three take any batch size, height and width.
        fpn: False exports the ResNet below the FPN; True requires an FPN; None takes the backbone as it is.
        layout: tensor names of ``safetensors``: ``detectron2``, or ``torchvision`` or ``timm`` for a ResNet without
            FPN.
        source: origin of the weights, copied to ``parity.json``.
        card: the result of :func:`.card_facts`: ``README.md`` becomes a model card.

    Returns:
        Input, outputs, differences from the model at two batch sizes and two image sizes, versions, SHA-256.

    Raises:
        ParityError: the file gives other numbers than the model.
        ExportError: an argument is out of range, or the format cannot express the backbone.
        OutputFolderError: ``output`` holds other files.
        MissingPackageError: a package that the format needs is not installed.
    """
    _check_arguments(file_format, layout, normalization)
    if fpn and not isinstance(backbone, FPN):
        raise ExportError(f"fpn (True): the backbone is a {type(backbone).__name__} without FPN. Fix: use --no-fpn.")
    if fpn is False and isinstance(backbone, FPN):
        backbone = backbone.bottom_up
    if layout != "detectron2" and isinstance(backbone, FPN):
        raise ExportError(f"layout ('{layout}'): {layout}'s ResNet has no FPN. Fix: use --no-fpn.")

    file, write = FORMATS[file_format]
    options = {"layout": layout} if file_format == "safetensors" else {}
    extractor = FeatureExtractor(backbone, normalization)
    with steps(2) as begin, atomic_folder(output, (file, *REPORT_FILES)) as folder:
        begin(f"writing {file}")
        written, entries = write(extractor, folder / file, **options)
        begin("comparing feature maps with the model's")
        cases = check_parity(extractor, written.run)
        entries |= {**written.description, "norm_layers": norm_counts(backbone)}
        entries |= {"tolerance": TOLERANCE, "worst_relative": worst_relative(cases), "cases": cases}
        return write_parity_files(folder / file, file_format, entries, source, card)


def _check_arguments(file_format: str, layout: str, normalization: Normalization) -> None:
    for name, value, allowed in (("file_format", file_format, FORMATS), ("layout", layout, LAYOUTS)):
        if value not in allowed:
            raise ExportError(f"{name} ({value!r}): unknown. Fix: use one of {', '.join(allowed)}.")
    if file_format == "safetensors":
        if normalization.inside:
            raise ExportError("file_format ('safetensors'): weights cannot normalize pixels. Fix: leave out --pixels.")
    elif layout != "detectron2":
        raise ExportError(f"layout ('{layout}'): {file_format} has no layouts. Fix: use --format safetensors.")
