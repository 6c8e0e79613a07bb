"""Write a program as torch.export or ONNX, or a backbone's weights as safetensors, and open the file."""

import copy
import io
import json
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torchvision  # noqa: F401  # registers operators that exported detectors use
from detectron2.modeling.backbone.resnet import BottleneckBlock
from safetensors.torch import load_file, save
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import ExportError
from ..installation import package_versions, require_packages
from ..weights.network import Preprocessing, Record, norm_record, tool
from ..weights.reading import sha256_of

if TYPE_CHECKING:
    from .backbone import FeatureExtractor

#: formats of a detector, and of a backbone
DETECTOR_FORMATS = ("pt2", "onnx")
FORMATS = (*DETECTOR_FORMATS, "safetensors")
#: the report beside an exported file
PARITY = "parity.json"
#: key of the description of inputs and outputs in an exported file
DESCRIPTION = "gw_detectron.json"
_PACKAGES = ("detectron2", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "safetensors")
# ONNX can multiply matrices, but has no operator that factorizes or inverts one.
_NOT_IN_ONNX = {"eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "ldl", "lu", "inv", "solve"}


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


class Program(Protocol):
    """A module to export: a function from named tensors to a tuple of named tensors."""

    names: list[str]  # of the outputs

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]: ...
    def sample_inputs(self) -> dict[str, Tensor]: ...
    def dynamic_shapes(self) -> dict[str, Any]: ...  # free dimensions of each input
    def describe(self) -> dict[str, Any]: ...  # inputs and outputs as plain values


def random_pixels(*shape: int, seed: int = 0) -> Tensor:
    """Draw pixels of 0 to 255."""
    return 255 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def write_program(program: Program, path: Path) -> ExportedFile:
    """Write a program in the format of the path's suffix."""
    if path.suffix == ".onnx":
        return _write_onnx(program, path)
    file = io.BytesIO()  # torch aborts the process when the disk is full, so serialize to memory first
    torch.export.save(_export_program(program), file, extra_files={DESCRIPTION: json.dumps(program.describe())})
    path.write_bytes(file.getbuffer())
    return open_pt2(path)


def _write_onnx(program: Program, path: Path) -> ExportedFile:
    require_packages("format ('onnx')", "onnx", "onnxscript", "onnxruntime")
    exported = _export_program(program)
    _check_onnx_operators(exported)
    names: dict[str, Any] = {"input_names": list(program.sample_inputs()), "output_names": program.names}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch's own exporter
            onnx = torch.onnx.export(exported, dynamo=True, optimize=False, verbose=False, **names)
            assert onnx is not None  # torch returns a program if dynamo=True
            _simplify(onnx.model)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(f"format ('onnx'): ONNX cannot express this model: {cause}. Fix: use pt2.") from error
    description = program.describe()
    given = description["input"]
    given["smallest_side"] = given["multiple_of"]  # no guards that refuse small images, unlike torch.export
    shape: Any = onnx.model.graph.inputs[0].shape
    axes = zip(shape, given["shape"], strict=True)
    onnx.rename_axes({axis: name for axis, name in axes if isinstance(name, str)})
    onnx.model.metadata_props[DESCRIPTION] = json.dumps(description | {"opset": onnx.model.opset_imports[""]})
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


def _export_program(program: Any) -> ExportedProgram:
    inputs = tuple(program.sample_inputs().values())
    with torch.no_grad():
        return torch.export.export(program, inputs, dynamic_shapes=program.dynamic_shapes(), strict=False)


def _check_onnx_operators(program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0].lstrip("_")
        if name.startswith("linalg_") and name.split("_")[1] in _NOT_IN_ONNX:
            raise ExportError(
                f"format ('onnx'): ONNX has no operator for {name}. Solvers that factorize a matrix, such as zca, and "
                "rotations need it; the newton solver does not. Fix: use pt2."
            )


def write_safetensors(extractor: "FeatureExtractor", path: Path) -> ExportedFile:
    """Write the weights of a backbone; the header describes input, outputs and the norm name of each norm layer."""
    backbone, description = extractor.backbone, extractor.describe()
    tensors = {name: value.contiguous() for name, value in backbone.state_dict().items()}
    blocks = [block for block in backbone.modules() if isinstance(block, BottleneckBlock)]
    stride_in_1x1 = any(block.conv1.stride != (1, 1) for block in blocks)
    given = extractor.normalization
    images = Preprocessing(given.channels, given.pixel_mean, given.pixel_std, stride_in_1x1)
    entries = {DESCRIPTION: description, **Record(norm_record(backbone), images).entries()}
    path.write_bytes(save(tensors, {"format": "pt", **{key: json.dumps(value) for key, value in entries.items()}}))
    loaded = copy.deepcopy(extractor)
    loaded.backbone.load_state_dict(load_file(path))
    return ExportedFile(loaded, description)


def write_parity(path: Path, entries: Mapping[str, Any], source: Mapping[str, str] | None) -> dict[str, Any]:
    """Write ``parity.json`` beside an exported file; return its content."""
    report = {
        "tool": tool(),
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
