"""Writers of the formats that hold a program: torch.export, ONNX, TorchScript."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.export import Dim, ExportedProgram

from ..errors import summarize_names
from .features import Features
from .parity import Run

#: key of the description inside a file; parity.json beside it has the same and more
DESCRIPTION = "gw_detectron.json"

# ONNX has products of matrices but nothing that factorises or inverts one.
_NOT_IN_ONNX = {"eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "ldl", "lu", "inv", "solve"}

logger = logging.getLogger(__name__)


class Written(NamedTuple):
    """A file that was written.

    Args:
        run: calls the file, read back from the disk.
        facts: what else is to be known about it.
    """

    run: Run
    facts: dict[str, Any]


class Format(NamedTuple):
    """A format of export.

    Args:
        file: the name of the file.
        packages: what has to be installed beside torch.
        write: writes the file.
    """

    file: str
    packages: tuple[str, ...]
    write: Callable[[Features, Path], Written]


def require(name: str, packages: tuple[str, ...]) -> None:
    """Checks that what a format needs is installed.

    Raises:
        ImportError: a package is missing; the message names it.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(
            f"the format {name} needs {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}"
        )


def write_pt2(features: Features, path: Path) -> Written:
    """Writes a torch.export program."""
    torch.export.save(_program(features), path, extra_files={DESCRIPTION: json.dumps(features.describe())})
    return Written(torch.export.load(path).module(), {})


def write_torchscript(features: Features, path: Path) -> Written:
    """Writes a TorchScript trace, which torch marks as deprecated."""
    logger.warning("TorchScript is deprecated by torch and kept for old runtimes; prefer the format pt2")
    with warnings.catch_warnings():
        # the deprecation was just said; what a trace may get wrong is what the parity check is for
        warnings.simplefilter("ignore")
        with torch.no_grad():
            traced = torch.jit.trace(features, _sample(features), check_trace=False)
        torch.jit.save(traced, path, _extra_files={DESCRIPTION: json.dumps(features.describe())})
        return Written(torch.jit.load(path), {"deprecated": "torch marks TorchScript as deprecated"})


def write_onnx(features: Features, path: Path) -> Written:
    """Writes an ONNX file with its weights inside.

    Raises:
        ValueError: ONNX cannot express a layer.
    """
    import onnxruntime

    program = _program(features)
    _check_expressible(program)
    try:
        # torch repeats a deprecation of its own on the way
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["images"], output_names=features.names
            )
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"ONNX cannot express this backbone: {_first_cause(error)}; pt2 can") from error
    assert exported is not None  # it is, with dynamo=True
    shape: Any = exported.model.graph.inputs[0].shape
    exported.rename_axes({shape[0]: "N", shape[2]: "H", shape[3]: "W"})
    exported.model.metadata_props[DESCRIPTION] = json.dumps(features.describe())
    exported.save(path, external_data=False)

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    order = {output.name: index for index, output in enumerate(session.get_outputs())}

    def run(images: torch.Tensor) -> list[torch.Tensor]:
        outputs = session.run(None, {"images": images.numpy()})
        return [torch.from_numpy(outputs[order[name]]) for name in features.names]

    return Written(run, {"opset": exported.model.opset_imports[""]})


def _sample(features: Features) -> torch.Tensor:
    return features.sample(2, features.side(1), features.side(2))


def _program(features: Features) -> ExportedProgram:
    multiple = features.multiple
    # torch.export knows by these sizes that every addition of two levels fits
    height, width = (Dim(name, min=features.smallest_side // multiple) for name in ("height", "width"))
    shape = {0: Dim("batch", min=1), 2: multiple * height, 3: multiple * width}
    with torch.no_grad():
        return torch.export.export(features, (_sample(features),), dynamic_shapes={"images": shape}, strict=False)


def _check_expressible(program: ExportedProgram) -> None:
    layers: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0].lstrip("_")
        if name.startswith("linalg_") and name.split("_")[1] in _NOT_IN_ONNX:
            module_stack = list(node.meta.get("nn_module_stack", {}).values())
            layer = module_stack[-1][0] if module_stack else "the model"
            layers.setdefault(name, []).append(layer.removeprefix("backbone."))
    for name, users in layers.items():
        raise ValueError(
            f"ONNX has no operator for {name}, used by {len(users)} layers ({summarize_names(users)}). Solvers that factorise a "
            "matrix, such as zca, and rotations cannot be written as ONNX. The format pt2 holds them; the newton "
            "solver can be written in every format"
        )


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)
