"""Write a program as torch.export or ONNX, and open the file."""

import io
import json
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision  # noqa: F401  # registers operators that exported detectors use
from torch import Tensor
from torch.export import ExportedProgram

from ...errors import ExportError
from ...installation import TOOL, package_versions, require_packages
from ...weights.reading import sha256_of

FORMATS = ("pt2", "onnx")
#: key of the description of inputs and outputs in an exported file
DESCRIPTION = "gw_detectron.json"
#: the report beside an exported file
PARITY = "parity.json"
_PACKAGES = ("detectron2", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime")


def check_format(file_format: str) -> None:
    if file_format not in FORMATS:
        raise ExportError(
            f"file_format ({file_format!r}): unknown. Fix: use one of {', '.join(FORMATS)}."
        )


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

    return ExportedFile(
        run, json.loads(session.get_modelmeta().custom_metadata_map.get(DESCRIPTION, "{}"))
    )


def random_pixels(*shape: int, seed: int = 0) -> Tensor:
    """Draw pixels of 0 to 255."""
    return 255 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def write_program(program: Any, path: Path) -> ExportedFile:
    """Write a FeatureExtractor, DetectorProgram or OneImageProgram in the format of the path's suffix."""
    if path.suffix == ".onnx":
        require_packages("format ('onnx')", "onnx", "onnxscript", "onnxruntime")
    inputs, shapes = tuple(program.sample_inputs().values()), program.dynamic_shapes()
    with torch.no_grad():
        exported = torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)
    if path.suffix == ".onnx":
        return _write_onnx(program, exported, path)
    file = (
        io.BytesIO()
    )  # torch aborts the process when the disk is full, so serialize to memory first
    torch.export.save(exported, file, extra_files={DESCRIPTION: json.dumps(program.describe())})
    path.write_bytes(file.getbuffer())
    return open_pt2(path)


def _write_onnx(program: Any, exported: ExportedProgram, path: Path) -> ExportedFile:
    names: dict[str, Any] = {
        "input_names": list(program.sample_inputs()),
        "output_names": program.names,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch's own exporter
            onnx = torch.onnx.export(
                exported, dynamo=True, optimize=False, verbose=False, **names
            )
            assert onnx is not None  # torch returns a program if dynamo=True
            _simplify(onnx.model)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(
            f"format ('onnx'): ONNX cannot express this model: {cause}. Fix: use pt2."
        ) from error
    description = program.describe()
    given = description["input"]
    given["smallest_side"] = given[
        "multiple_of"
    ]  # no guards that refuse small images, unlike torch.export
    shape: Any = onnx.model.graph.inputs[0].shape
    axes = zip(shape, given["shape"], strict=True)
    onnx.rename_axes({axis: name for axis, name in axes if isinstance(name, str)})
    onnx.model.metadata_props[DESCRIPTION] = json.dumps(
        description | {"opset": onnx.model.opset_imports[""]}
    )
    onnx.save(path, external_data=False)
    return open_onnx(path)


def _simplify(model: Any) -> None:
    """Fold constants and batch norms, and remove what is repeated or unused.

    The optimizer of torch's exporter searches pairs of slices in time quadratic in the number of nodes: it takes three
    times as long (118 s instead of 40 s for Mask R-CNN R-50 FPN).
    """
    from onnx_ir.passes import Sequential, common
    from onnxscript.optimizer import fold_constants, inline
    from onnxscript.rewriter import rewrite
    from onnxscript.rewriter.rules.common import fuse_batchnorm_into_conv_rule

    inline(model)
    for _ in range(2):  # the second round folds what the first one leaves
        fold_constants(model)
        rewrite(model, [fuse_batchnorm_into_conv_rule])
    Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


def write_parity(
    path: Path, entries: Mapping[str, Any], source: Mapping[str, str] | None
) -> dict[str, Any]:
    """Write ``parity.json`` beside an exported file; return its content."""
    report = {
        "tool": TOOL,
        "file": path.name,
        "format": path.suffix[1:],
        "sha256": sha256_of(path),
        "bytes": path.stat().st_size,
        "source": dict(source or {}),
        **entries,
        "versions": {"python": platform.python_version(), **package_versions(_PACKAGES)},
    }
    path.with_name(PARITY).write_text(json.dumps(report, indent=2) + "\n")
    return report
