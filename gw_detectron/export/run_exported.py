"""Open an exported program and run it."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  # registers operators that exported detectors use
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances
from torch import Tensor

from ..errors import ConfigError, FileAccessError, UserError, first_line
from ..installation import require_packages
from ..weights.record import DESCRIPTION

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@dataclass(frozen=True)
class ExportedFile:
    """An exported program, on the CPU.

    Args:
        run: its function, from tensors to a sequence of tensors.
        description: its inputs and outputs, as the export wrote them.
    """

    run: Callable[..., Sequence[Tensor]]
    description: dict[str, Any]


def open_pt2(path: Path) -> ExportedFile:
    """Open a torch.export program, which can run code: torch evaluates expressions that the file holds."""
    entries = {DESCRIPTION: ""}
    with _tensors_only():
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


#: suffix -> opener
OPENERS = {".pt2": open_pt2, ".onnx": open_onnx}


def open_exported(path: str | os.PathLike[str]) -> ExportedFile:
    """Open an exported program of any format.

    Raises:
        ConfigError: the suffix is not that of an exported program.
        FileAccessError: the file does not exist or is damaged.
        MissingPackageError: onnxruntime is not installed.
    """
    path = Path(path)
    if path.suffix not in OPENERS:
        raise ConfigError(f"'{path}': not an exported program. Fix: give a file that ends in {' or '.join(OPENERS)}.")
    try:
        return OPENERS[path.suffix](path)
    except UserError:
        raise
    except Exception as error:  # onnxruntime has an exception class for every kind of damage
        raise FileAccessError(f"'{path}': cannot be read: {first_line(error)}. Fix: export the model again.") from error


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Let torch.load refuse pickles that hold more than tensors, which torch.export.load would run."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[_WEIGHTS_ONLY]
        if before is not None:
            os.environ[_WEIGHTS_ONLY] = before


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


def postprocess(result: Instances, height: int, width: int) -> Instances:
    """Scale boxes to an image and paste masks into it, unless masks are pasted."""
    if result.has("pred_masks") and result.pred_masks.dtype == torch.bool:
        return result
    return detector_postprocess(result, height, width)
