"""Open an exported program and run it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  # registers operators that exported detectors use
from detectron2.structures import Boxes, Instances
from torch import Tensor

from ..installation import require_packages
from ..weights.record import DESCRIPTION


@dataclass(frozen=True)
class ExportedFile:
    """An exported program, on the CPU."""

    run: Callable[..., Sequence[Tensor]]
    description: dict[str, Any]  # of inputs and outputs, as the export wrote them


def open_pt2(path: Path) -> ExportedFile:
    """Open a torch.export program of our own: such a file can run code."""
    entries = {DESCRIPTION: ""}
    program = torch.export.load(path, extra_files=entries)
    return ExportedFile(program.module(), json.loads(entries[DESCRIPTION] or "{}"))


def open_onnx(path: Path) -> ExportedFile:
    """Open an ONNX model in ONNX Runtime."""
    require_packages(f"'{path}'", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # else OMP_NUM_THREADS has no effect
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = [each.name for each in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        feed = {name: tensor.numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    return ExportedFile(run, json.loads(session.get_modelmeta().custom_metadata_map.get(DESCRIPTION, "{}")))


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
    return [_to_instances(image.shape[1:], outputs) for image, outputs in zip(images, named, strict=True)]


def _pad_batch(images: Sequence[Tensor], smallest_side: int) -> tuple[Tensor, Tensor]:
    """Pad images to one tensor, (N, 3, H, W); also return their sizes, (N, 2)."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(0).clamp(min=smallest_side).tolist()
    # white padding: the file has to replace it
    pads = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    return torch.stack([F.pad(image, pad, value=255.0) for image, pad in zip(images, pads, strict=True)]), sizes


def _to_instances(size: Sequence[int], outputs: Mapping[str, Tensor]) -> Instances:
    """Wrap the outputs for one image; rows behind the detections are dropped."""
    count = int(outputs["count"])
    result = Instances(tuple(size))
    result.pred_boxes = Boxes(outputs["boxes"][:count])
    result.scores, result.pred_classes = outputs["scores"][:count], outputs["classes"][:count]
    if "masks" in outputs:
        masks = outputs["masks"][:count]
        result.pred_masks = masks if masks.dtype == torch.bool else masks[:, None]  # as Detectron2 shapes them
    return result
