"""Write a backbone as a program: torch.export, ONNX or TorchScript."""

import importlib.util
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from ..checkpoint.norm_inference import DESCRIPTION
from ..errors import MissingPackageError, summarize_names
from .feature_extractor import FeatureExtractor
from .parity import ExportError, Run

# ONNX can multiply matrices, but has no operator that factorizes or inverts one.
_NOT_IN_ONNX = {"eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "ldl", "lu", "inv", "solve"}

logger = logging.getLogger(__name__)


#: a function that calls the written file, read back from disk; and more entries of the report
Written = tuple[Run, dict[str, Any]]


def write_pt2(extractor: FeatureExtractor, path: Path) -> Written:
    """Write a torch.export program."""
    file = io.BytesIO()  # writing to a full disk, torch would end the whole process
    torch.export.save(_export_program(extractor), file, extra_files={DESCRIPTION: json.dumps(extractor.describe())})
    path.write_bytes(file.getbuffer())
    return (torch.export.load(path).module(), {})


def write_torchscript(extractor: FeatureExtractor, path: Path) -> Written:
    """Write a TorchScript trace, which torch has deprecated."""
    logger.warning("TorchScript is deprecated in torch; use it for old runtimes only and prefer pt2.")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the deprecation is logged above; the parity check finds wrong traces
        traced = torch.jit.trace(extractor, _sample(extractor), check_trace=False)
        save_trace(traced, path, {DESCRIPTION: json.dumps(extractor.describe())})
        return (torch.jit.load(path), {"deprecated": "TorchScript is deprecated in torch"})


def save_trace(traced: Any, path: Path, extra_files: dict[str, str] | None = None) -> None:
    """Save a trace; a full disk is an OSError, where torch would end the whole process."""
    file = io.BytesIO()
    torch.jit.save(traced, file, _extra_files=extra_files)
    path.write_bytes(file.getbuffer())


def write_onnx(extractor: FeatureExtractor, path: Path) -> Written:
    """Write an ONNX file with the weights inside.

    Raises:
        ExportError: ONNX cannot express a layer.
        MissingPackageError: a package of ONNX is not installed.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"format ('onnx'): not installed: {', '.join(missing)}. Fix: pip install {' '.join(missing)}"
        )
    import onnxruntime

    program = _export_program(extractor)
    _check_onnx_operators(program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch's own exporter
            exported = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["images"], output_names=extractor.names
            )
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(f"format ('onnx'): ONNX cannot express this backbone: {cause}. Fix: use pt2.") from error
    assert exported is not None  # torch returns a program if dynamo=True
    shape: Any = exported.model.graph.inputs[0].shape
    exported.rename_axes({shape[0]: "N", shape[2]: "H", shape[3]: "W"})
    exported.model.metadata_props[DESCRIPTION] = json.dumps(extractor.describe())
    exported.save(path, external_data=False)

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(images: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(output) for output in session.run(extractor.names, {"images": images.numpy()})]

    return (run, {"opset": exported.model.opset_imports[""]})


def _sample(extractor: FeatureExtractor) -> torch.Tensor:
    return extractor.sample(2, extractor.side(1), extractor.side(2))


def _export_program(extractor: FeatureExtractor) -> ExportedProgram:
    multiple = extractor.multiple
    # dimensions as multiples tell torch.export that the levels of an FPN fit each other
    height, width = (Dim(name, min=extractor.smallest_side // multiple) for name in ("height", "width"))
    shape = {0: Dim("batch", min=1), 2: multiple * height, 3: multiple * width}
    with torch.no_grad():
        return torch.export.export(extractor, (_sample(extractor),), dynamic_shapes={"images": shape}, strict=False)


def _check_onnx_operators(program: ExportedProgram) -> None:
    layers: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0].lstrip("_")
        if name.startswith("linalg_") and name.split("_")[1] in _NOT_IN_ONNX:
            module_stack = list(node.meta.get("nn_module_stack", {}).values())
            layer = module_stack[-1][0] if module_stack else "the model"
            layers.setdefault(name, []).append(layer.removeprefix("backbone."))
    for name, users in layers.items():
        raise ExportError(
            f"format ('onnx'): ONNX has no operator for {name}, used by {len(users)} layers "
            f"({summarize_names(users)}). Solvers that factorize a matrix, such as zca, and rotations need it; the "
            "newton solver does not. Fix: use pt2."
        )
