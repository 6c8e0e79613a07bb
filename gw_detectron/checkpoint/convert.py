"""ImageNet weights in torchvision's names to a Detectron2 backbone's, with nothing lost in silence, and back."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from detectron2.layers import get_norm
from torch import Tensor

from ..errors import summarize_names
from ..layers import RUNNING
from ..modeling import resolve_norm
from .architecture import POOL_NORM, Architecture, Module, infer_architecture, infer_positions, norms_at
from .reading import WeightsFileError

_log = logging.getLogger(__name__)

_BEFORE_FC = f"{POOL_NORM[0]}."
_WRAPPERS = ("model", "state_dict")
_STATISTICS = ("running_mean", "running_var")


class Row(NamedTuple):
    """What became of one tensor of the source; ``target`` is empty for one that was dropped."""

    source: str
    target: str
    shape: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Conversion:
    """Weights of a Detectron2 ResNet and what is known about them.

    Args:
        tensors: float32, under the names of ``backbone.bottom_up`` without that prefix.
        architecture: the network.
        positions: where whitening stands, one of ``"" S1 S1-B1 S1-B2 S1-B3 S1-B12 ALL``.
        norm: every other norm, ``BN`` or ``GN``.
        rows: one for each tensor of the source.
        pool_norm: the norm between the last average pooling and the classifier, which learns decorrelated features;
            "" for none.
    """

    tensors: dict[str, Tensor]
    architecture: Architecture
    positions: str
    norm: str
    rows: tuple[Row, ...]
    pool_norm: str = ""

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
    """Renames, reshapes and checks the weights of a ResNet or ResNeXt in torchvision's names.

    The network and the positions of whitening are recognised from the tensors. A norm without running statistics is
    whitening; if all norms are so, and their scales have one dimension as torch's own layers write them, they are
    GroupNorm, unless ``positions`` is ``"ALL"``.

    Args:
        content: what a file holds: a state dict, bare or under ``model`` or ``state_dict``, with or without the prefix
            ``module.`` of data-parallel training.
        architecture: what it has to be, e.g. ``R-50`` or ``X-101-32x8d``; None accepts any.
        positions: where whitening has to stand; None accepts any.
        keep_fc: keep the classifier, as ``linear``, and the norm before it, as ``avgpool.norm``.
        pool_norm: the name of that norm with its options, e.g. ``BW:channels=32,solver=zca``; "" leaves it out. None
            takes it for the usual one that has such tensors, and warns where its options could be others. The authors'
            ResNeXts have a norm there that takes no part in their forward pass; with None it is left out.

    Raises:
        ValueError: a tensor is missing, left over, of wrong shape or type, or not finite; or the file is of another
            network than asked for; or ``pool_norm`` is unknown, does not fit, or is given without ``keep_fc``.
    """
    tensors = unwrap(content)
    network = infer_architecture(tensors)
    if architecture is not None and Architecture.parse(architecture) != network:
        raise WeightsFileError(f"these are the weights of {network.name}, not of {architecture}")
    found, norm = _recognise_norms(network, tensors, positions)
    if pool_norm and not keep_fc:
        raise WeightsFileError(f"pool_norm={pool_norm!r} is kept with the classifier only: add keep_fc (--keep-fc)")
    if pool_norm is None:
        pool_norm = _guess_pool_norm(tensors, norm) if keep_fc and not network.name.startswith("X-") else ""

    converted: dict[str, Tensor] = {}
    rows = []
    problems: dict[str, list[str]] = {}
    left = dict(tensors)
    classes = _number_of_classes(tensors) if keep_fc else None
    for expected in [*_expected(network, found, norm, classes), *_expected_before_fc(network, pool_norm)]:
        value = left.pop(expected.source, None)
        if value is None:
            problems.setdefault("missing", []).append(expected.source)
            continue
        problem, note = _check(value, expected), ""
        if problem:
            problems.setdefault(problem, []).append(f"{expected.source} {_describe(value)}")
            continue
        value = value.detach()
        if value.dtype != torch.float32:
            note = f"{value.dtype} -> float32".replace("torch.", "")
            value = value.float()
        if expected.flat and value.dim() > 1:
            note = f"reshaped from {tuple(value.shape)}"
            value = value.reshape(-1)
        converted[expected.target] = value
        rows.append(Row(expected.source, expected.target, tuple(value.shape), note))
    counters = {f"{m.torchvision}.num_batches_tracked" for m in network.modules() if m.kind == "norm"}
    counters.add(f"{_BEFORE_FC}num_batches_tracked")
    for name, value in left.items():
        reason = _reason_to_drop(name, counters, pool_norm)
        if reason:
            rows.append(Row(name, "", tuple(value.shape), reason))
            continue
        whole = f"{network.name} with {found or 'no whitening'}"
        if name.startswith(_BEFORE_FC):
            whole = f"{pool_norm}, the norm before the classifier (state another with pool_norm, --pool-norm)"
        problems.setdefault(f"not part of {whole}", []).append(name)
    if problems:
        lines = [f"{len(names)} {problem}: {summarize_names(names)}" for problem, names in problems.items()]
        raise WeightsFileError("\n  ".join([f"taken for {network.name}, but of its tensors", *lines]))
    return Conversion(converted, network, found, norm, tuple(rows), pool_norm)


def to_torchvision(tensors: Mapping[str, Tensor], *, authors_affine: bool = False) -> dict[str, Tensor]:
    """Gives the weights of a Detectron2 ResNet the names of torchvision and timm; the inverse of :func:`convert`.

    Args:
        tensors: the state dict of a Detectron2 ResNet, i.e. of ``backbone.bottom_up`` in a detector with FPN.
        authors_affine: give scale and shift of norms without running statistics the shape (1, C, 1, 1), as the
            authors' layer has it, instead of (C,).

    Raises:
        ValueError: these are not the tensors of a ResNet or ResNeXt.
    """
    network = infer_architecture(tensors, layout="detectron2")
    modules = {module.detectron2: module for module in network.modules()}
    theirs, ours = POOL_NORM
    modules[ours] = Module(theirs, ours, "norm", modules["linear"].shape)
    renamed = {}
    unknown = []
    for name, value in tensors.items():
        # a norm before the classifier may have parts of its own, such as a rotation
        prefix = ours if name.startswith(f"{ours}.") else name.rpartition(".")[0]
        suffix = name.removeprefix(f"{prefix}.")
        module = modules.get(prefix)
        if module is None:
            unknown.append(name)
            continue
        if authors_affine and module.kind == "norm" and f"{prefix}.running_mean" not in tensors:
            value = value.reshape(1, -1, 1, 1)
        renamed[f"{module.torchvision}.{suffix}"] = value
    if unknown:
        raise WeightsFileError(f"{network.name} has no {summarize_names(unknown)}")
    return renamed


def unwrap(content: Any) -> dict[str, Tensor]:
    """Finds the state dict in what a checkpoint file holds.

    Raises:
        ValueError: there is none, or there are two.
    """
    while isinstance(content, Mapping):
        found = [key for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if len(found) > 1:
            raise WeightsFileError(f"there are weights under both {' and '.join(map(repr, found))}; keep one")
        if not found:
            break
        content = content[found[0]]
    if not isinstance(content, Mapping) or not content:
        kind = "an empty dict" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise WeightsFileError(f"expected a dict of tensors, bare or under 'model' or 'state_dict', but found {kind}")
    others = [f"{key!r} ({type(value).__name__})" for key, value in content.items() if not _is_entry(key, value)]
    if others:
        raise WeightsFileError(
            f"expected a dict of tensors, bare or under 'model' or 'state_dict', but found {summarize_names(others)}"
        )
    tensors = dict(content)
    while all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return tensors


def _is_entry(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, Tensor)


def _recognise_norms(network: Architecture, tensors: Mapping[str, Tensor], positions: str | None) -> tuple[str, str]:
    """Says where whitening stands, and what the other norms are."""
    norms = [module for module in network.modules() if module.kind == "norm"]
    plain = [module for module in norms if not any(f"{module.torchvision}.{name}" in tensors for name in _STATISTICS)]
    scales = [tensors[name] for module in plain if (name := f"{module.torchvision}.weight") in tensors]
    if plain == norms and positions != "ALL" and all(scale.dim() == 1 for scale in scales):
        found, norm = "", "GN"
    else:
        found, norm = infer_positions(network, plain), "BN"
    if positions is not None and positions != found:
        seen = f"whitening at {found}" if found else f"{norm} and no whitening"
        raise WeightsFileError(f"these weights have {seen}, not whitening at {positions!r}")
    return found, norm


def _guess_pool_norm(tensors: Mapping[str, Tensor], norm: str) -> str:
    """Names the norm before the classifier by the statistics it has; options that leave no trace are the usual ones."""
    fields = {name.removeprefix(_BEFORE_FC): value for name, value in tensors.items() if name.startswith(_BEFORE_FC)}
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
        "the norm before the classifier is taken for %s with its usual options, for those it was trained with leave no "
        "trace in the weights. If they are others, every logit is wrong: convert the source with its full name, as in "
        "--pool-norm %s (pool_norm= in Python)",
        found,
        f"{found},solver=zca" if ":" in found else f"{found}:groups=32",
    )
    return found


class _Expected(NamedTuple):
    source: str
    target: str
    shape: tuple[int, ...]
    flat: bool  # (1, C, 1, 1) or (1, C) stands for (C,)


def _expected(network: Architecture, positions: str, norm: str, classes: int | None) -> Iterator[_Expected]:
    whitened = set(norms_at(network, positions))
    for module in network.modules():
        if module.kind == "conv":
            shapes = {"weight": module.shape}
        elif module.kind == "norm":
            has_statistics = norm == "BN" and module not in whitened
            shapes = dict.fromkeys(("weight", "bias", *(_STATISTICS if has_statistics else ())), module.shape)
        else:
            shapes = {"weight": (classes, *module.shape), "bias": (classes,)} if classes is not None else {}
        for field, shape in shapes.items():
            yield _Expected(f"{module.torchvision}.{field}", f"{module.detectron2}.{field}", shape, module in whitened)


def _expected_before_fc(network: Architecture, pool_norm: str) -> Iterator[_Expected]:
    if not pool_norm:
        return
    theirs, ours = POOL_NORM
    (channels,) = next(module.shape for module in network.modules() if module.kind == "linear")
    with torch.device("meta"):  # shapes only
        layer = get_norm(resolve_norm(pool_norm, where="pool_norm", channels=[channels]), channels)
    for field, value in layer.state_dict().items():
        if field != "num_batches_tracked":
            shape = tuple(value.shape)
            yield _Expected(f"{theirs}.{field}", f"{ours}.{field}", shape, field in ("weight", "bias"))


def _check(value: Tensor, expected: _Expected) -> str:
    """Says what is wrong with a tensor, as the end of "3 ...", or "" if nothing is."""
    shape = tuple(value.shape)
    broadcast = (1, *expected.shape)
    if shape != expected.shape and not (expected.flat and shape in (broadcast, (*broadcast, 1, 1))):
        return f"of wrong shape where {expected.shape} belongs"
    if value.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return "of wrong type where float32 belongs (float16 and bfloat16 are widened)"
    if value.layout != torch.strided:
        return "not dense"
    if value.is_meta:
        return "without numbers (saved on the device meta)"
    if not torch.isfinite(value).all():
        return "with values that are NaN or infinite"
    if expected.target.endswith(".running_var") and (value < 0).any():
        return "with a negative variance"
    return ""


def _number_of_classes(tensors: Mapping[str, Tensor]) -> int:
    weight = tensors.get("fc.weight")
    return len(weight) if weight is not None and weight.dim() else 1


def _reason_to_drop(name: str, counters: set[str], pool_norm: str) -> str:
    if name in counters:
        return "counts training steps, not used"
    if name in ("fc.weight", "fc.bias"):
        return "classifier, not part of the backbone"
    if name.startswith(_BEFORE_FC) and not pool_norm:
        return "norm before the classifier, not part of the backbone"
    return ""


def _describe(value: Tensor) -> str:
    return f"{tuple(value.shape)} {value.dtype}".replace("torch.", "")
