"""Write a backbone or a detector as a program: torch.export, ONNX or TorchScript."""

import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..errors import ExportError, summarize_names
from ..installation import require_packages
from ..weights.metadata import DESCRIPTION
from .exported_file import ExportedFile, open_onnx, open_pt2, open_torchscript

# ONNX can multiply matrices, but has no operator that factorizes or inverts one.
_NOT_IN_ONNX = {"eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals", "qr", "cholesky", "ldl", "lu", "inv", "solve"}

logger = logging.getLogger(__name__)

#: the written file, read back from disk; and more entries of the report
Written = tuple[ExportedFile, dict[str, Any]]


class Program(Protocol):
    """A module to export: a function from named tensors to a tuple of named tensors."""

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]: ...

    @property
    def names(self) -> list[str]:
        """Names of the outputs."""

    def sample_inputs(self) -> dict[str, Tensor]:
        """Return inputs by name."""

    def dynamic_shapes(self) -> dict[str, Any]:
        """Return the free dimensions of each input, for torch.export."""

    def describe(self) -> dict[str, Any]:
        """Describe inputs and outputs as plain values."""


def write_pt2(program: Program, path: Path) -> Written:
    """Write a torch.export program."""
    file = io.BytesIO()  # writing to a full disk, torch would end the whole process
    torch.export.save(_export_program(program), file, extra_files={DESCRIPTION: json.dumps(program.describe())})
    path.write_bytes(file.getbuffer())
    return (open_pt2(path), {})


def write_torchscript(program: Program, path: Path) -> Written:
    """Write a TorchScript trace, which torch has deprecated."""
    logger.warning("TorchScript is deprecated in torch; use it for old runtimes only and prefer pt2.")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the deprecation is logged above; the parity check finds wrong traces
        traced: Any = torch.jit.trace(program, tuple(program.sample_inputs().values()), check_trace=False)
        file = io.BytesIO()  # writing to a full disk, torch would end the whole process
        torch.jit.save(traced, file, _extra_files={DESCRIPTION: json.dumps(_describe_operations(program))})
        path.write_bytes(file.getbuffer())
        return (open_torchscript(path), {"deprecated": "TorchScript is deprecated in torch"})


def write_onnx(program: Program, path: Path) -> Written:
    """Write an ONNX file with the weights inside.

    Raises:
        ExportError: ONNX cannot express a layer.
        MissingPackageError: a package of ONNX is not installed.
    """
    require_packages("format ('onnx')", "onnx", "onnxscript", "onnxruntime")
    exported = _export_program(program)
    _check_onnx_operators(exported)
    inputs = list(program.sample_inputs())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch's own exporter
            onnx = torch.onnx.export(
                exported,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=inputs,
                output_names=program.names,
            )
            assert onnx is not None  # torch returns a program if dynamo=True
            _simplify(onnx.model)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ExportError(f"format ('onnx'): ONNX cannot express this model: {cause}. Fix: use pt2.") from error
    description = _describe_operations(program)
    shape: Any = onnx.model.graph.inputs[0].shape
    axes = zip(shape, description["input"]["shape"], strict=True)
    onnx.rename_axes({axis: name for axis, name in axes if isinstance(name, str)})
    onnx.model.metadata_props[DESCRIPTION] = json.dumps(description)
    onnx.save(path, external_data=False)
    return (open_onnx(path), {"opset": onnx.model.opset_imports[""]})


def _simplify(model: Any) -> None:
    """Fold constants and batch norms, and remove what is repeated or unused.

    The optimizer of torch's exporter does the same and rewrites more patterns. It is not used, as its search for one of
    them, pairs of slices, takes time in the square of the number of nodes, a large part of a detector's export.
    """
    from onnx_ir.passes import Sequential, common
    from onnxscript.optimizer import fold_constants, inline
    from onnxscript.rewriter import rewrite
    from onnxscript.rewriter.rules.common import fuse_batchnorm_into_conv_rule

    inline(model)
    for _ in range(2):  # what the first round leaves, the second one folds
        fold_constants(model)
        rewrite(model, [fuse_batchnorm_into_conv_rule])
    Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


def _describe_operations(program: Program) -> dict[str, Any]:
    """Describe a graph of operations alone: unlike torch.export's, it has no guards that refuse small images."""
    description = program.describe()
    given = description["input"]
    return {**description, "input": {**given, "smallest_side": given["multiple_of"]}}


def _export_program(program: Any) -> ExportedProgram:
    inputs = tuple(program.sample_inputs().values())
    with torch.no_grad():
        return torch.export.export(program, inputs, dynamic_shapes=program.dynamic_shapes(), strict=False)


def _check_onnx_operators(program: ExportedProgram) -> None:
    layers: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        name = getattr(node.target, "__name__", "").partition(".")[0].lstrip("_")
        if name.startswith("linalg_") and name.split("_")[1] in _NOT_IN_ONNX:
            module_stack = list(node.meta.get("nn_module_stack", {}).values())
            layer = module_stack[-1][0] if module_stack else "the model"
            layers.setdefault(name, []).append(layer.removeprefix("model.").removeprefix("backbone."))
    for name, users in layers.items():
        raise ExportError(
            f"format ('onnx'): ONNX has no operator for {name}, used by {len(users)} layers "
            f"({summarize_names(users)}). Solvers that factorize a matrix, such as zca, and rotations need it; the "
            "newton solver does not. Fix: use pt2."
        )
