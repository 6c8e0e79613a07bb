"""Convert ImageNet weights between torchvision's names and Detectron2's, and check every tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import WeightsError, summarize_names
from ..norms.conversion import CONVS
from .architecture import POOL_NORM, Architecture, Norms, build_torchvision, detectron2_name, infer_architecture
from .metadata import Notes, read_notes
from .norm_inference import infer_norms, infer_pool_norm
from .provenance import Provenance, tool
from .reading import Contents, weight_problem

_WRAPPERS = ("model", "state_dict")
_AVERAGED = ("state_dict_ema", "model_ema", "ema")  # of timm and others
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and torch.compile
_COUNTER = ".num_batches_tracked"


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
    """

    tensors: dict[str, Tensor]
    source_tensors: dict[str, Tensor]
    rows: tuple[ConversionRow, ...]
    provenance: Provenance

    @property
    def architecture(self) -> Architecture:
        return Architecture.parse(self.provenance.architecture)

    @property
    def pool_norm(self) -> str:
        """The norm between the last average pooling and the classifier; "" for none."""
        return self.provenance.pool_norm or ""

    @property
    def has_classifier(self) -> bool:
        return "linear.weight" in self.tensors


def convert(
    content: Any,
    *,
    architecture: str | None = None,
    positions: str | None = None,
    norm: str | None = None,
    keep_fc: bool = False,
    pool_norm: str | None = None,
    notes: Notes | None = None,
) -> Conversion:
    """Rename, reshape and check ResNet or ResNeXt weights with torchvision's names.

    The architecture and the layers with batch normalization are inferred from the tensors. All other norms must be
    recorded in the content, or stated.

    Args:
        content: a state dict, bare or under ``model`` or ``state_dict``, with or without the prefix ``module.`` of
            data-parallel training.
        architecture: the expected one, e.g. ``R-50`` or ``X-101-32x8d``; None accepts any.
        positions: the expected positions of the norm without BN's statistics; None accepts any.
        norm: the norm name of all layers without BN's statistics, e.g. ``GW:groups=32``; None if recorded.
        keep_fc: keep the classifier, as ``linear``, and the norm before it, as ``avgpool.norm``.
        pool_norm: the norm name of that norm, e.g. ``BW:channels=32,solver=zca``; "" drops the norm; None if recorded
            or BN. The authors' ResNeXts have such a norm, but do not use it in their forward pass: None drops it.
        notes: what the file records; None reads it from the content.

    Raises:
        UnknownNormError: a norm is neither recorded nor proven nor stated.
        WeightsError: a tensor is missing, unexpected, not finite, or of wrong shape or type; the network is not the
            expected one; norms contradict each other; or ``pool_norm`` is given without ``keep_fc``.
        ValueError: a norm name is unknown or does not fit.
    """
    notes = read_notes(Contents(content)) if notes is None else notes
    if standardized := [name for name, norm in (notes.norms or {}).items() if norm in CONVS]:
        raise WeightsError(
            f"{standardized[0]} ('WS'): Weight Standardization, which converted weights do not record. Fix: set "
            "MODEL.WEIGHTS to the checkpoint of the run, such as model_final.pth, with MODEL.RESNETS.CONV WS."
        )
    tensors = unwrap(content)
    network = infer_architecture(tensors)
    if architecture is not None and Architecture.parse(architecture) != network:
        raise WeightsError(
            f"architecture ({architecture!r}): the weights are of {network.name}. Fix: give {network.name} or none."
        )
    if notes.provenance is not None:
        notes.provenance.check_architecture(network)
    norms = infer_norms(network, tensors, notes, norm, positions)
    if pool_norm and not keep_fc:
        raise WeightsError(f"pool_norm ({pool_norm!r}): needs the classifier. Fix: add keep_fc=True (--keep-fc).")
    used_pool_norm = infer_pool_norm(network, tensors, notes, pool_norm) if keep_fc else ""
    assumed = norm is None and notes.provenance is not None and notes.provenance.whiten_norm is None
    if norm is None and notes.provenance is not None:
        notes.provenance.warn_of_assumed_norms()
    provenance = Provenance(
        tool(),
        "",
        "",
        network.name,
        norms.positions,
        norms.norm,
        pool_norm=used_pool_norm if keep_fc else None,
        whiten_norm=None if assumed else norms.whiten_norm,
    )
    converted, rows = _convert_tensors(tensors, network, norms, used_pool_norm, keep_fc)
    return Conversion(converted, tensors, tuple(rows), provenance)


def _convert_tensors(
    tensors: Mapping[str, Tensor], network: Architecture, norms: Norms, pool_norm: str, keep_fc: bool
) -> tuple[dict[str, Tensor], list[ConversionRow]]:
    """Convert the tensors if all fit torchvision's network."""
    fc = tensors.get("fc.weight")
    classes = len(fc) if fc is not None and fc.dim() else 1
    model = build_torchvision(network, norms, pool_norm, classes if keep_fc else None)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items() if not name.endswith(_COUNTER)}
    # the authors' scale and shift are (1, C, 1, 1), or (1, C) before the classifier
    affine = [layer.torchvision for layer, spec in norms.by_layer(network).items() if spec.startswith("GW")]
    flat = {f"{layer}.{field}" for layer in (*affine, POOL_NORM.detectron2) for field in ("weight", "bias")}

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
            part = f"{network.name} with {norms}"
            if source.startswith(f"{POOL_NORM.torchvision}."):
                part = f"{pool_norm}, the norm before the classifier (state another by pool_norm, --pool-norm)"
            problems.setdefault(f"unexpected, not part of {part}", []).append(source)
    if problems:
        lines = [f"{len(names)} {problem}: {summarize_names(names)}" for problem, names in problems.items()]
        fix = "Fix: give complete weights of one network."
        raise WeightsError("\n  ".join([f"tensors: do not fit {network.name}", *lines, fix]))
    return converted, rows


def to_torchvision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Detectron2 ResNet tensors to torchvision's and timm's names; inverse of :func:`convert`.

    Args:
        tensors: the state dict of a Detectron2 ResNet, e.g. of ``backbone.bottom_up`` in a detector with FPN.

    Raises:
        WeightsError: these are not the tensors of a ResNet or ResNeXt.
    """
    network = infer_architecture(tensors, layout="detectron2")
    modules = {module.detectron2: module for module in (*network.modules(), POOL_NORM)}
    renamed, unexpected = {}, []
    for name, value in tensors.items():
        prefix = name.rpartition(".")[0]
        while prefix and prefix not in modules:  # a norm may have submodules, such as a rotation
            prefix = prefix.rpartition(".")[0]
        if not prefix:
            unexpected.append(name)
            continue
        renamed[modules[prefix].torchvision + name.removeprefix(prefix)] = value
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
        if averaged := [key for key in _AVERAGED if isinstance(content.get(key), Mapping)]:
            raise WeightsError(
                f"keys ({found[0]!r} and {averaged[0]!r}): both hold weights, the latter averaged over the training. "
                "Fix: save one of them alone, under 'state_dict'."
            )
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
    while prefix := next((text for text in _PREFIXES if all(name.startswith(text) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


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
    return weight_problem(name, value)


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
