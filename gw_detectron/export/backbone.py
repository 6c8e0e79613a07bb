"""Export of a backbone, with or without FPN: the file, its proof, and how to load it."""

import functools
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import detectron2
import torch
import torchvision
from detectron2.modeling import FPN, Backbone

from ..checkpoint.provenance import sha256_of, tool
from ..modeling.norm_table import norm_rows
from .features import Features, Normalisation
from .folder import whole_folder
from .formats import Format, require, write_onnx, write_pt2, write_torchscript
from .parity import TOLERANCE, check_parity, worst_relative
from .readme import backbone_readme
from .weights_file import LAYOUTS, write_safetensors

FORMATS = {
    "pt2": Format("backbone.pt2", (), write_pt2),
    "onnx": Format("backbone.onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx),
    "torchscript": Format("backbone.ts", (), write_torchscript),
    "safetensors": Format("backbone.safetensors", (), functools.partial(write_safetensors, layout="detectron2")),
}
_OTHER_PACKAGES = ("onnx", "onnxscript", "onnxruntime", "safetensors")


def export_backbone(
    backbone: Backbone,
    output: str | os.PathLike[str],
    normalisation: Normalisation,
    *,
    file_format: str = "pt2",
    fpn: bool | None = None,
    layout: str = "detectron2",
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Writes a backbone as a function from an image tensor to a tuple of feature maps, and proves it right.

    The folder ``output`` appears with three files once everything has succeeded, or not at all: the exported file,
    ``parity.json`` with what this function returns, and ``README.md``, which loads the file.

    Args:
        backbone: a Detectron2 backbone with its weights; it is copied and stays as it is.
        output: the folder to make. It may exist if it is empty or holds an earlier export in the same format, which is
            replaced.
        normalisation: how images become the backbone's input, and whether the exported function does it.
        file_format: ``pt2`` (torch.export), ``onnx``, ``torchscript`` (a trace; deprecated by torch) or
            ``safetensors`` (weights only). Batch size, height and width are free in the first three.
        fpn: False exports the ResNet below the FPN; True demands an FPN; None takes the backbone as it is.
        layout: of ``safetensors``: ``detectron2``, or ``torchvision`` or ``timm`` for a ResNet alone.
        source: where the weights are from, to be noted in ``parity.json``.

    Returns:
        Input, outputs, the differences from the model at two batch sizes and two image sizes, versions, SHA-256.

    Raises:
        ParityError: the file gives other numbers than the model.
        ValueError: an argument is out of its range, or the format cannot express the backbone.
        FileExistsError: ``output`` holds something else.
        ImportError: a package that the format needs is not installed.
    """
    if file_format not in FORMATS:
        raise ValueError(f"unknown format {file_format!r}; allowed are {', '.join(FORMATS)}")
    chosen = FORMATS[file_format]
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; allowed are {', '.join(LAYOUTS)}")
    if file_format == "safetensors":
        chosen = chosen._replace(write=functools.partial(write_safetensors, layout=layout))
        if normalisation.inside:
            raise ValueError("safetensors holds weights and no function, so it cannot normalise pixels by itself")
    elif layout != "detectron2":
        raise ValueError(f"the layout {layout} is one of weights alone, for the format safetensors, not {file_format}")
    require(file_format, chosen.packages)
    backbone = _with_or_without_fpn(backbone, fpn)
    if layout != "detectron2" and isinstance(backbone, FPN):
        raise ValueError(f"{layout}'s ResNet has no FPN; export the ResNet alone (--no-fpn)")

    features = Features(backbone, normalisation)
    with whole_folder(Path(output), (chosen.file, "parity.json", "README.md")) as folder:
        path = folder / chosen.file
        written = chosen.write(features, path)
        cases = check_parity(features, written.run)
        report = {
            "tool": tool(),
            "file": chosen.file,
            "format": file_format,
            **written.facts,
            "sha256": sha256_of(path),
            "bytes": path.stat().st_size,
            "source": dict(source or {}),
            **features.describe(),
            "norm_layers": dict(Counter(row.spec for row in norm_rows(backbone))),
            "tolerance": TOLERANCE,
            "worst_relative": worst_relative(cases),
            "cases": cases,
            "versions": versions(),
        }
        (folder / "parity.json").write_text(json.dumps(report, indent=2) + "\n")
        (folder / "README.md").write_text(backbone_readme(report))
    return report


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that take part in an export and are installed."""
    found = {"python": platform.python_version()}
    found |= {module.__name__: module.__version__ for module in (detectron2, torch, torchvision)}
    for package in _OTHER_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # some are needed by one format only
    return found


def _with_or_without_fpn(backbone: Backbone, fpn: bool | None) -> Backbone:
    if fpn and not isinstance(backbone, FPN):
        raise ValueError(f"this backbone is a {type(backbone).__name__} without FPN, but an FPN was asked for")
    if fpn is False and isinstance(backbone, FPN):
        return backbone.bottom_up
    return backbone
