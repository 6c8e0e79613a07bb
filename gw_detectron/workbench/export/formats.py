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

from ...atomic import write_json
from ...errors import ConfigError, ExportError
from ...installation import TOOL, package_versions, require_packages
from ...weights import Preprocessing
from ...weights.reading import sha256_of

FORMATS = ("pt2", "onnx")
#: key of the description of inputs and outputs in an exported file
DESCRIPTION = "gw_detectron.json"
#: the report beside an exported file
PARITY = "parity.json"
_PACKAGES = ("detectron2", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime")


def check_channels(preprocessing: Preprocessing) -> None:
    channels = preprocessing.input_format
    counts = {len(preprocessing.pixel_mean), len(preprocessing.pixel_std)}
    if channels not in ("RGB", "BGR", "L") or counts != {len(channels)}:
        raise ConfigError(
            f"INPUT.FORMAT ({channels!r}): only models of color or gray images are exported. Fix: "
            "use RGB or BGR with three values of MODEL.PIXEL_MEAN and PIXEL_STD, or L with one."
        )


def describe_images(preprocessing: Preprocessing, **sizes: int) -> dict[str, Any]:
    """Describe the input of a program as plain values, for metadata and reports.

    The program normalizes pixels of 0 to 255 itself.
    """
    return {
        "name": "images",
        "type": "float32",
        "shape": ["N", len(preprocessing.pixel_mean), "H", "W"],
        "channels": preprocessing.input_format,
        "pixel_mean": preprocessing.pixel_mean,
        "pixel_std": preprocessing.pixel_std,
        **sizes,
    }


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
    # else OMP_NUM_THREADS has no effect
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        feed = {
            name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)
        }
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    metadata = session.get_modelmeta().custom_metadata_map
    return ExportedFile(run, json.loads(metadata.get(DESCRIPTION, "{}")))


def random_pixels(*shape: int, seed: int = 0) -> Tensor:
    """Draw pixels of 0 to 255."""
    return 255 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def write_program(program: Any, path: Path) -> ExportedFile:
    """Write a program in the format of the path's suffix.

    It is a FeatureExtractor, DetectorProgram or OneImageProgram.
    """
    file_format = path.suffix[1:]
    if file_format not in FORMATS:
        raise ExportError(
            f"file_format ({file_format!r}): unknown. Fix: use one of {', '.join(FORMATS)}."
        )
    if file_format == "onnx":
        require_packages("format ('onnx')", "onnx", "onnxscript", "onnxruntime")
    with torch.no_grad():
        exported = torch.export.export(
            program,
            tuple(program.sample_inputs().values()),
            dynamic_shapes=program.dynamic_shapes(),
            strict=False,
        )
    if file_format == "onnx":
        return _write_onnx(program, exported, path)

    # to memory first: torch aborts the process when the disk is full
    file = io.BytesIO()
    torch.export.save(
        exported, file, extra_files={DESCRIPTION: json.dumps(program.describe())}
    )
    path.write_bytes(file.getbuffer())
    return open_pt2(path)


def _write_onnx(program: Any, exported: ExportedProgram, path: Path) -> ExportedFile:
    try:
        onnx = _convert_to_onnx(program, exported)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(
            f"format ('onnx'): ONNX cannot express this model: {cause}. Fix: use pt2."
        ) from error

    description = program.describe() | {"opset": onnx.model.opset_imports[""]}
    images = description["input"]
    # no guards that refuse small images, unlike torch.export
    images["smallest_side"] = images["multiple_of"]
    axes = zip(onnx.model.graph.inputs[0].shape, images["shape"], strict=True)
    onnx.rename_axes({axis: name for axis, name in axes if isinstance(name, str)})
    onnx.model.metadata_props[DESCRIPTION] = json.dumps(description)
    onnx.save(path, external_data=False)
    return open_onnx(path)


def _convert_to_onnx(program: Any, exported: ExportedProgram) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch's own exporter
        onnx: Any = torch.onnx.export(
            exported,
            dynamo=True,
            optimize=False,
            verbose=False,
            input_names=list(program.sample_inputs()),
            output_names=program.names,
        )
        _simplify(onnx.model)
    return onnx


def _simplify(model: Any) -> None:
    """Fold constants and batch norms, and remove what is repeated or unused.

    The optimizer of torch's exporter searches pairs of slices in time quadratic in the number of
    nodes: it takes three times as long (118 s instead of 40 s for Mask R-CNN R-50 FPN).
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
        "versions": {
            "python": platform.python_version(),
            **package_versions(_PACKAGES),
        },
    }

    write_json(path.with_name(PARITY), report)
    return report
