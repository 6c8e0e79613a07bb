"""Convert ImageNet weights between torchvision's names and Detectron2's, and check every tensor."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import summarize_names
from ..layers import RUNNING
from ..modeling.resnet import POSITIONS
from .architecture import (
    POOL_NORM,
    Architecture,
    WeightsError,
    build_torchvision,
    detectron2_name,
    infer_architecture,
    norms_at,
)
from .provenance import Provenance, tool

_log = logging.getLogger(__name__)

_WRAPPERS = ("model", "state_dict")
_COUNTER = ".num_batches_tracked"
_STATISTICS = ("running_mean", "running_var")


class ConversionRow(NamedTuple):
    """Result for one source tensor; ``target`` is empty for a dropped tensor."""

    source: str
    target: str
    shape: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Conversion:
    """Weights of a Detectron2 ResNet.

    Args:
        tensors: float32, with the names of ``backbone.bottom_up`` without that prefix.
        source_tensors: the tensors before the conversion, with torchvision's names.
        rows: one for each source tensor.
        provenance: the network and the origin.
        pool_norm: the norm between the last average pooling and the classifier, stated or guessed; "" for none.
    """

    tensors: dict[str, Tensor]
    source_tensors: dict[str, Tensor]
    rows: tuple[ConversionRow, ...]
    provenance: Provenance
    pool_norm: str = ""

    @property
    def architecture(self) -> Architecture:
        return Architecture.parse(self.provenance.architecture)

    @property
    def positions(self) -> str:
        return self.provenance.positions

    @property
    def has_classifier(self) -> bool:
        return "linear.weight" in self.tensors


def convert(
    content: Any,
    *,
    architecture: str | None = None,
    positions: str | None = None,
    keep_fc: bool = False,
    pool_norm: str | None = None,
) -> Conversion:
    """Rename, reshape and check ResNet or ResNeXt weights with torchvision's names.

    The architecture and the positions of GW are inferred from the tensors. A norm without running statistics is GW. If
    no norm has statistics and all scales are one-dimensional, as in torch's own layers, the norms are GN; with
    ``positions="ALL"`` they are GW.

    Args:
        content: a state dict, bare or under ``model`` or ``state_dict``, with or without the prefix ``module.`` of
            data-parallel training.
        architecture: the expected one, e.g. ``R-50`` or ``X-101-32x8d``; None accepts any.
        positions: the expected positions of GW; None accepts any.
        keep_fc: keep the classifier, as ``linear``, and the norm before it, as ``avgpool.norm``.
        pool_norm: the spec of that norm, e.g. ``BW:channels=32,solver=zca``; "" drops the norm. None guesses the spec
            from its tensors, with a warning where options cannot be inferred. The authors' ResNeXts have such a norm,
            but do not use it in their forward pass: None drops it.

    Raises:
        WeightsError: a tensor is missing, unexpected, not finite, or of wrong shape or type; the network is not the
            expected one; or ``pool_norm`` is given without ``keep_fc``.
        ValueError: ``pool_norm`` is unknown or does not fit.
    """
    tensors = unwrap(content)
    network = infer_architecture(tensors)
    if architecture is not None and Architecture.parse(architecture) != network:
        raise WeightsError(
            f"architecture ({architecture!r}): the weights are of {network.name}. Fix: give {network.name} or none."
        )
    found, norm = _infer_norms(network, tensors, positions)
    if pool_norm and not keep_fc:
        raise WeightsError(f"pool_norm ({pool_norm!r}): needs the classifier. Fix: add keep_fc=True (--keep-fc).")
    used_pool_norm = pool_norm or ""
    if pool_norm is None and keep_fc and not network.name.startswith("X-"):
        used_pool_norm = _guess_pool_norm(tensors, norm)
    provenance = Provenance(tool(), "", "", network.name, found, norm, pool_norm=pool_norm)
    converted, rows = _convert_tensors(tensors, network, provenance, used_pool_norm, keep_fc)
    return Conversion(converted, tensors, tuple(rows), provenance, used_pool_norm)


def _convert_tensors(
    tensors: Mapping[str, Tensor], network: Architecture, provenance: Provenance, pool_norm: str, keep_fc: bool
) -> tuple[dict[str, Tensor], list[ConversionRow]]:
    """Convert the tensors if all fit torchvision's network."""
    fc = tensors.get("fc.weight")
    classes = len(fc) if fc is not None and fc.dim() else 1
    model = build_torchvision(network, provenance.positions, provenance.norm, pool_norm, classes if keep_fc else None)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.endswith(_COUNTER)}
    # scale and shift may be (1, C, 1, 1) or (1, C) here
    affine = [*(module.torchvision for module in norms_at(network, provenance.positions)), POOL_NORM.detectron2]
    flat = {f"{module}.{field}" for module in affine for field in ("weight", "bias")}

    left = dict(tensors)
    converted, rows = {}, []
    problems: dict[str, list[str]] = {}
    for name, shape in expected.items():
        source = name.replace(POOL_NORM.detectron2, POOL_NORM.torchvision)
        value = left.pop(source, None)
        if value is None:
            problems.setdefault("missing", []).append(source)
        elif problem := _check(name, value, shape, name in flat):
            problems.setdefault(problem, []).append(f"{source} {tuple(value.shape)} {_dtype(value)}")
        else:
            note = "" if value.dtype == torch.float32 else f"{_dtype(value)} -> float32"
            if value.shape != shape:
                note = f"reshaped from {tuple(value.shape)}"
            target = detectron2_name(name)
            converted[target] = value.detach().float().reshape(shape)
            rows.append(ConversionRow(source, target, shape, note))
    for source, value in left.items():
        if reason := _reason_to_drop(source, network, pool_norm):
            rows.append(ConversionRow(source, "", tuple(value.shape), reason))
        else:
            part = f"{network.name} with {provenance.positions or 'no GW'}"
            if source.startswith(f"{POOL_NORM.torchvision}."):
                part = f"{pool_norm}, the norm before the classifier (state another by pool_norm, --pool-norm)"
            problems.setdefault(f"unexpected, not part of {part}", []).append(source)
    if problems:
        lines = [f"{len(names)} {problem}: {summarize_names(names)}" for problem, names in problems.items()]
        fix = "Fix: give complete weights of one network."
        raise WeightsError("\n  ".join([f"tensors: do not fit {network.name}", *lines, fix]))
    return converted, rows


def to_torchvision(tensors: Mapping[str, Tensor], *, authors_affine: bool = False) -> dict[str, Tensor]:
    """Rename Detectron2 ResNet tensors to torchvision's and timm's names; inverse of :func:`convert`.

    Args:
        tensors: the state dict of a Detectron2 ResNet, e.g. of ``backbone.bottom_up`` in a detector with FPN.
        authors_affine: reshape scale and shift of norms without running statistics from (C,) to (1, C, 1, 1), as in
            the authors' layer.

    Raises:
        WeightsError: these are not the tensors of a ResNet or ResNeXt.
    """
    network = infer_architecture(tensors, layout="detectron2")
    modules = {module.detectron2: module for module in (*network.modules(), POOL_NORM)}
    renamed, unexpected = {}, []
    for name, value in tensors.items():
        # the norm before the classifier may have submodules, such as a rotation
        before_fc = name.startswith(f"{POOL_NORM.detectron2}.")
        prefix = POOL_NORM.detectron2 if before_fc else name.rpartition(".")[0]
        module = modules.get(prefix)
        if module is None:
            unexpected.append(name)
            continue
        if authors_affine and module.kind == "norm" and f"{prefix}.running_mean" not in tensors:
            value = value.reshape(1, -1, 1, 1)
        renamed[module.torchvision + name.removeprefix(prefix)] = value
    if unexpected:
        raise WeightsError(f"tensors ({summarize_names(unexpected)}): not part of {network.name}. Fix: leave them out.")
    return renamed


def unwrap(content: Any) -> dict[str, Tensor]:
    """Find the state dict in the content of a checkpoint file.

    Raises:
        WeightsError: there is none, or there are two.
    """
    while isinstance(content, Mapping):
        found = [key for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if len(found) > 1:
            raise WeightsError(f"keys ({' and '.join(map(repr, found))}): both hold weights. Fix: keep one.")
        if not found:
            break
        content = content[found[0]]
    wrong = f"an empty {type(content).__name__}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
    if isinstance(content, Mapping) and content:
        others = [
            f"{key!r} ({type(value).__name__})"
            for key, value in content.items()
            if not (isinstance(key, str) and isinstance(value, Tensor))
        ]
        wrong = summarize_names(others)
    if wrong:
        raise WeightsError(
            f"content ({wrong}): not a dict of tensors. Fix: give one, bare or under 'model' or 'state_dict'."
        )
    tensors = dict(content)
    while all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return tensors


def _infer_norms(network: Architecture, tensors: Mapping[str, Tensor], expected: str | None) -> tuple[str, str]:
    """Infer the positions of GW and the other norm."""
    norms = [module for module in network.modules() if module.kind == "norm"]
    plain = [module for module in norms if not any(f"{module.torchvision}.{name}" in tensors for name in _STATISTICS)]
    scales = [tensors[name] for module in plain if (name := f"{module.torchvision}.weight") in tensors]
    possible = [positions for positions in POSITIONS if network.bottleneck or positions != "S1-B3"]
    if plain == norms and expected != "ALL" and all(scale.dim() == 1 for scale in scales):
        found, norm = [""], "GN"
    else:
        found, norm = [name for name in possible if norms_at(network, name) == plain], "BN"
    if not found:
        names = summarize_names(module.torchvision for module in plain)
        raise WeightsError(
            f"norms without running statistics ({len(plain)} of {len(norms)}: {names}): together they are none of the "
            f"positions {', '.join(possible[1:])}. Fix: give weights with GW at one of them."
        )
    if expected not in (None, found[0]):
        seen = f"GW at {found[0]}" if found[0] else f"{norm} and no GW"
        raise WeightsError(f"positions ({expected!r}): the weights have {seen}. Fix: give {found[0]!r} or none.")
    return found[0], norm


def _guess_pool_norm(tensors: Mapping[str, Tensor], norm: str) -> str:
    """Guess the spec of the norm before the classifier from its tensors."""
    prefix = f"{POOL_NORM.torchvision}."
    fields = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    if not fields:
        return ""
    if "running_var" in fields:
        return "BN"
    found = norm if norm == "GN" else "GW"
    for running in RUNNING:
        rows = fields.get(f"running_{running}")
        if rows is not None and rows.dim():
            found = f"BW:channels={rows.shape[-1]},running={running}"
    _log.warning(
        "pool_norm (not given): guessed as %s, because the weights do not show its options. With other options every "
        "logit is wrong. Fix: convert the source with the full spec, as in --pool-norm %s (pool_norm= in Python).",
        found,
        f"{found},solver=zca" if ":" in found else f"{found}:groups=32",
    )
    return found


def _check(name: str, value: Tensor, expected: tuple[int, ...], flat: bool) -> str:
    """Return the problem of a tensor, or "".

    The text follows a number of tensors: "2 of wrong shape".
    """
    shape = tuple(value.shape)
    if shape != expected and not (flat and shape in ((1, *expected), (1, *expected, 1, 1))):
        return f"of wrong shape, expected {expected}"
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "of wrong type, expected float32, float16 or bfloat16"
    if value.layout != torch.strided:
        return "not dense"
    if value.is_meta:
        return "without numbers (saved on the meta device)"
    if not torch.isfinite(value).all():
        return "with values that are NaN or infinite"
    if name.endswith(".running_var") and (value < 0).any():
        return "with a negative variance"
    return ""


def _reason_to_drop(name: str, network: Architecture, pool_norm: str) -> str:
    module, _, field = name.rpartition(".")
    norms = {module.torchvision for module in (*network.modules(), POOL_NORM) if module.kind == "norm"}
    if f".{field}" == _COUNTER and module in norms:
        return "step counter, not used"
    if name in ("fc.weight", "fc.bias"):
        return "classifier, not part of the backbone"
    if name.startswith(f"{POOL_NORM.torchvision}.") and not pool_norm:
        return "norm before the classifier, not part of the backbone"
    return ""


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
