"""Write a program as torch.export or ONNX, or a backbone's weights as safetensors."""

import copy
import io
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from detectron2.layers import get_norm
from detectron2.modeling.backbone.resnet import BottleneckBlock
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..errors import ExportError
from ..installation import require_packages
from ..norms import conv_names, evaluation_spec, norm_rows, resolve_norm
from ..weights.architecture import build_torchvision, detectron2_name, infer_architecture, to_torchvision
from ..weights.record import DESCRIPTION, NORMS, PREPROCESSING_KEY, norm_record
from ..weights.verify import torchvision_stages
from .run_exported import ExportedFile, open_onnx, open_pt2

if TYPE_CHECKING:
    from .backbone import FeatureExtractor

#: formats of a detector, and of a backbone
DETECTOR_FORMATS = ("pt2", "onnx")
FORMATS = (*DETECTOR_FORMATS, "safetensors")
#: tensor names of safetensors
LAYOUTS = ("detectron2", "torchvision")
# ONNX can multiply matrices, but has no operator that factorizes or inverts one.
_NOT_IN_ONNX = {"eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "ldl", "lu", "inv", "solve"}

#: the written file, read back from disk; and more entries of the report
Written = tuple[ExportedFile, dict[str, Any]]


class Program(Protocol):
    """A module to export: a function from named tensors to a tuple of named tensors."""

    names: list[str]  # of the outputs

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]: ...
    def sample_inputs(self) -> dict[str, Tensor]: ...
    def dynamic_shapes(self) -> dict[str, Any]: ...  # free dimensions of each input
    def describe(self) -> dict[str, Any]: ...  # inputs and outputs as plain values


def write_program(program: Program, path: Path) -> Written:
    """Write a program in the format of the path's suffix.

    Raises:
        ExportError: ONNX cannot express a layer.
        MissingPackageError: a package of ONNX is not installed.
    """
    if path.suffix == ".onnx":
        return _write_onnx(program, path)
    file = io.BytesIO()  # torch aborts the process when the disk is full, so serialize to memory first
    torch.export.save(_export_program(program), file, extra_files={DESCRIPTION: json.dumps(program.describe())})
    path.write_bytes(file.getbuffer())
    return open_pt2(path), {}


def _write_onnx(program: Program, path: Path) -> Written:
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
    onnx.model.metadata_props[DESCRIPTION] = json.dumps(description)
    onnx.save(path, external_data=False)
    return open_onnx(path), {"opset": onnx.model.opset_imports[""]}


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


def write_safetensors(extractor: "FeatureExtractor", path: Path, layout: str = "detectron2") -> Written:
    """Write the weights of a backbone, and describe input, outputs and norms in the header.

    The header's ``norms`` maps norm layers to norm names; in torchvision's layout, those that are not BN.

    Raises:
        ExportError: torchvision's ResNet cannot compute the same function.
    """
    backbone, description = extractor.backbone, extractor.describe()
    tensors = {name: value.contiguous() for name, value in backbone.state_dict().items()}
    blocks = {name: block for name, block in backbone.named_modules() if isinstance(block, BottleneckBlock)}
    images = {
        "input_format": description["input"]["channels"],
        **{key: description["input"][key] for key in ("pixel_mean", "pixel_std")},
        "stride_in_1x1": any(block.conv1.stride != (1, 1) for block in blocks.values()),
    }
    records = {DESCRIPTION: json.dumps(description), PREPROCESSING_KEY: json.dumps(images)}
    metadata = {"format": "pt", "layout": layout, **records}
    if layout == "detectron2":
        path.write_bytes(save(tensors, {**metadata, NORMS: json.dumps(norm_record(backbone))}))
        loaded = copy.deepcopy(extractor)
        loaded.backbone.load_state_dict(load_file(path))
        return ExportedFile(loaded, description), {"layout": layout}

    _check_torchvision_compatible(backbone, blocks)
    renamed = to_torchvision(tensors)
    network = infer_architecture(renamed)
    names = {detectron2_name(name): name for name in network.norm_layers}
    rows = [row for row in norm_rows(backbone) if row.layer in names and evaluation_spec(row.spec) != "BN:"]
    norms = {names[row.layer]: row.spec for row in rows}
    path.write_bytes(save(renamed, {**metadata, NORMS: json.dumps(norms)}))
    model = build_torchvision(network).eval()
    for row in rows:
        model.set_submodule(names[row.layer], get_norm(resolve_norm(row.spec), row.channels).eval())
    try:
        model.load_state_dict(load_file(path), assign=True)
    except RuntimeError as error:
        raise ExportError(
            f"layout ('{layout}'): torchvision's {network.name} does not take these weights: {error}. "
            "Fix: use --layout detectron2."
        ) from error

    def run(images: Tensor) -> list[Tensor]:
        with torch.no_grad():
            stages = torchvision_stages(model, images)
        return [stages[name] for name in extractor.names]

    return ExportedFile(run, description), {"layout": layout, "network": network.name, "norms": norms}


def _check_torchvision_compatible(backbone: nn.Module, blocks: dict[str, BottleneckBlock]) -> None:
    """Refuse convolutions, strides and dilation that torchvision does differently; the weights do not show them."""
    key = ""
    if conv_names(backbone):
        key = "MODEL.RESNETS.CONV ('WS'): torchvision does not standardize weights"
    for name, block in blocks.items():
        if block.conv1.stride != (1, 1):
            key = f"MODEL.RESNETS.STRIDE_IN_1X1 (True): torchvision has the stride of {name} in the 3x3 convolution"
        elif block.conv2.dilation != (1, 1):
            key = f"MODEL.RESNETS.RES5_DILATION (2): {name} is dilated; torchvision dilates other convolutions"
    if key:
        raise ExportError(f"{key}. Fix: use --layout detectron2.")
