"""Open an exported file: its function and its description."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision  # noqa: F401  # registers operators that exported detectors use
from torch import Tensor

from ..errors import ConfigError, FileAccessError, UserError, first_line
from ..installation import require_packages
from ..weights.metadata import DESCRIPTION
from .parity import Run

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@dataclass(frozen=True)
class ExportedFile:
    """An exported program, on the CPU.

    Args:
        run: its function, from tensors to a sequence of tensors.
        description: its inputs and outputs, as the export wrote them.
    """

    run: Run
    description: dict[str, Any]


def open_pt2(path: Path) -> ExportedFile:
    """Open a torch.export program, which can run code: torch evaluates expressions that the file holds."""
    entries = {DESCRIPTION: ""}
    with _tensors_only():
        program = torch.export.load(path, extra_files=entries)
    return ExportedFile(program.module(), _description(entries))


def open_torchscript(path: Path) -> ExportedFile:
    """Open a TorchScript file."""
    entries = {DESCRIPTION: ""}
    module = torch.jit.load(path, map_location="cpu", _extra_files=entries)
    return ExportedFile(module, _description(entries))


def open_onnx(path: Path) -> ExportedFile:
    """Open an ONNX model.

    Raises:
        MissingPackageError: onnxruntime is not installed.
    """
    require_packages(f"'{path}'", "onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # else OMP_NUM_THREADS has no effect
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = [each.name for each in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        feed = {name: tensor.numpy() for name, tensor in zip(inputs, tensors, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    return ExportedFile(run, _description(session.get_modelmeta().custom_metadata_map))


#: suffix -> opener
OPENERS = {".pt2": open_pt2, ".onnx": open_onnx, ".ts": open_torchscript}


def open_exported(path: str | os.PathLike[str]) -> ExportedFile:
    """Open an exported file of any format.

    Raises:
        ConfigError: the suffix is not that of an exported program.
        FileAccessError: the file does not exist or is damaged.
        MissingPackageError: onnxruntime is not installed.
    """
    path = Path(path)
    if path.suffix not in OPENERS:
        raise ConfigError(f"'{path}': not an exported program. Fix: give a file that ends in {', '.join(OPENERS)}.")
    try:
        return OPENERS[path.suffix](path)
    except UserError:
        raise
    except Exception as error:  # onnxruntime has an exception of its own for every kind of damage
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


def _description(entries: Mapping[str, str | bytes]) -> dict[str, Any]:
    return json.loads(entries.get(DESCRIPTION) or "{}")
