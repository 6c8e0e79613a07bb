"""Parse and print norm names: ``NAME`` or ``NAME:key=value,key=value``.

- ``"" BN SyncBN FrozenBN GN LN nnSyncBN naiveSyncBN naiveSyncBN_N`` go to Detectron2's ``get_norm`` unchanged. Without
  Detectron2, ``"" BN SyncBN GN`` are torch's layers, and ``FrozenBN`` is torchvision's.
- ``GN:groups=16,eps=1e-5`` is GroupNorm with another number of groups.
- ``GW`` is ``GW:groups=64,iters=5,eps=1e-5,solver=newton``, Group Whitening with the published setting.
- ``BW`` is ``BW:channels=64,iters=5,eps=1e-5,solver=newton,running=matrix,momentum=0.1,sync=false,rotation=none``,
  batch whitening. ``BW:running=covariance`` is the papers' BW_Sigma. ``BW:solver=zca`` is DBN, whose released code has
  16 channels and eps 1e-3 by default. ``FrozenBW`` is batch whitening with fixed statistics.
- ``BN:rotation=cayley`` is BN with a learnable rotation of every 64 channels (``channels=64``) before scale and shift.
- ``MixGW`` is ``MixGW:alpha=0.5,mean=0.5,groups=64,iters=6,eps=1e-5``, for weights that were trained with BN: BN's
  fixed statistics, mixed with each image's covariance and mean. ``MixBN:alpha=0.5,mean=0.5,eps=1e-5`` mixes variances
  instead. ``mean`` is ``alpha`` where it is not given.
- ``BRN`` is ``BRN:momentum=0.01,rmax=3,dmax=5,warmup=5000,rmax_at=40000,dmax_at=25000``, Batch Renormalization.

``solver`` is a name in :data:`gw_detectron.layers.SOLVERS`. ``corr=true`` standardizes, then decorrelates.
``threshold`` belongs to the solver ``zca_max``, ``iters`` to ``newton``; with another solver they are errors.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import NormError, first_line, similar_names
from ..installation import has_detectron2, scripting_warnings_ignored
from ..layers import (
    BatchRenorm2d,
    BatchWhitening2d,
    FrozenBatchWhitening2d,
    GroupWhitening2d,
    MixedBatchNorm2d,
    MixedWhitening2d,
)
from ..ops.arguments import check_divides, check_integer, check_number
from ..ops.solvers import OPTION_SOLVER

#: an argument of Detectron2's ``get_norm``: one of its names, or a function of the number of channels
Norm = str | Callable[[int], nn.Module]
#: Detectron2's norm names; v0.6 lacks LN
DETECTRON2_NORMS = (
    "BN",
    "SyncBN",
    "FrozenBN",
    "GN",
    "LN",
    "nnSyncBN",
    "naiveSyncBN",
    "naiveSyncBN_N",
)

_STOCK: dict[str, Callable[[int], nn.Module]] = {
    "BN": nn.BatchNorm2d,
    "SyncBN": nn.SyncBatchNorm,
    "GN": functools.partial(nn.GroupNorm, 32),
}
#: classes of the layers that these libraries build, and their names
_STOCK_CLASSES: dict[Any, str] = {
    nn.SyncBatchNorm: "SyncBN",
    nn.BatchNorm2d: "BN",
    nn.GroupNorm: "GN",
}
# torchvision may be missing, or made for another torch
with contextlib.suppress(ImportError, RuntimeError):
    from torchvision.ops import FrozenBatchNorm2d

    _STOCK["FrozenBN"] = FrozenBatchNorm2d
    _STOCK_CLASSES[FrozenBatchNorm2d] = "FrozenBN"

if has_detectron2():
    with scripting_warnings_ignored():
        import detectron2.layers.batch_norm as batch_norm
    get_norm = batch_norm.get_norm
    _STOCK_CLASSES[batch_norm.NaiveSyncBatchNorm] = "naiveSyncBN"
    _STOCK_CLASSES[batch_norm.FrozenBatchNorm2d] = "FrozenBN"
    _available = set(DETECTRON2_NORMS)
    if hasattr(batch_norm, "LayerNorm"):  # channels-first; torch's is another layer
        _STOCK_CLASSES[batch_norm.LayerNorm] = "LN"
    else:
        _available.remove("LN")
else:
    _available = set(_STOCK)

    def get_norm(norm: Norm, out_channels: int) -> nn.Module | None:
        """Build the layer of a norm name, as Detectron2's ``get_norm`` does."""
        if isinstance(norm, str):
            return _STOCK[norm](out_channels) if norm else None
        return norm(out_channels)


def _group_norm(
    num_channels: int, num_groups: int = 32, eps: float = 1e-5, **tensor_options: Any
) -> nn.GroupNorm:
    check_integer("num_groups", num_groups, least=1, example=32)
    check_number("eps", eps, least=0, example=1e-5)
    check_divides(num_groups, num_channels)  # torch 2.7 does not name them
    return nn.GroupNorm(num_groups, num_channels, eps, **tensor_options)


def _rotated_batch_norm(
    num_channels: int, rotation: str = "none", **arguments: Any
) -> BatchWhitening2d:
    """Make BN with a rotation: batch whitening that standardizes, with BN's running variance."""
    if rotation != "cayley":
        raise ValueError(
            "BN takes options only with rotation=cayley. Fix: add rotation=cayley, or write 'BN'."
        )
    return BatchWhitening2d(num_channels, **_ROTATED_BN, **arguments)


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text]


_ROTATED_BN: dict[str, Any] = {
    "solver": "standardize",
    "running": "covariance",
    "rotation": "cayley",
}
#: option -> argument of the factory, and the function that reads its text
_Options = dict[str, tuple[str, Callable[[str], Any]]]
_GROUPS: _Options = {"groups": ("num_groups", int)}
_CHANNELS: _Options = {"channels": ("channels_per_group", int)}
_EPS: _Options = {"eps": ("eps", float)}
_ITERS: _Options = {"iters": ("num_iters", int)}
_SOLVER: _Options = {
    **_ITERS,
    **_EPS,
    "solver": ("solver", str),
    "threshold": ("threshold", float),
    "corr": ("corr", _boolean),
}
_BATCH_OPTIONS: _Options = {
    "momentum": ("momentum", float),
    "sync": ("sync", _boolean),
    "rotation": ("rotation", str),
}
_MIXTURE: _Options = {"alpha": ("alpha", float), "mean": ("mean", float)}
_BW = _CHANNELS | _SOLVER | {"running": ("running", str)} | _BATCH_OPTIONS
_BRN: _Options = {
    "momentum": ("momentum", float),
    "rmax": ("rmax", float),
    "dmax": ("dmax", float),
    "warmup": ("warmup", int),
    "rmax_at": ("rmax_at", int),
    "dmax_at": ("dmax_at", int),
}
#: name -> layer class or function, and its options
_NORMS: dict[str, tuple[Callable[..., nn.Module], _Options]] = {
    "GW": (GroupWhitening2d, _GROUPS | _SOLVER),
    "FrozenBW": (FrozenBatchWhitening2d, _BW),
    "BW": (BatchWhitening2d, _BW),
    "BRN": (BatchRenorm2d, _BRN),
    "MixGW": (MixedWhitening2d, _MIXTURE | _GROUPS | _ITERS | _EPS),
    "MixBN": (MixedBatchNorm2d, _MIXTURE | _EPS),
    "GN": (_group_norm, _GROUPS | _EPS),
    "BN": (_rotated_batch_norm, _CHANNELS | _EPS | _BATCH_OPTIONS),
}
_KINDS: dict[Callable[[str], Any], str] = {
    int: "an integer",
    float: "a number",
    _boolean: "true or false",
}
#: options that a printed name shows only if they differ from these values
_IMPLIED = {"threshold": 0.01, "corr": False, "sync": False, "rotation": "none"}


def norm_options() -> dict[str, list[str]]:
    """Return the norm names that exist here, sorted, and the options of each."""
    options = {name: list(known) for name, (_, known) in _NORMS.items()}
    return {name: options.get(name, []) for name in sorted(_available | options.keys())}


def resolve_norm(spec: Norm | None, *, where: str = "norm") -> Norm:
    """Turn a norm name into an argument of Detectron2's ``get_norm``.

    Args:
        spec: the norm name, see the head of this module. None means no norm, as in Detectron2. A function or class that
            takes the channel count is returned as it is.
        where: the place that an error message names, e.g. ``"MODEL.FPN.NORM"``.

    Returns:
        One of Detectron2's names unchanged, or a ``functools.partial`` that takes the channel count.

    Raises:
        NormError: unknown name or option, or a value of the wrong type. The returned function raises it for values out
            of their range, and for channels that the groups do not divide.
    """
    if spec in (None, "", *_available):
        return spec or ""
    if callable(spec) and not isinstance(spec, nn.Module):
        return spec

    label = f"{where} ({spec!r})"
    if not isinstance(spec, str):
        raise NormError(f"{label}: not a norm name. Fix: give a string such as 'GW'.")
    try:
        factory, arguments = _parse(spec)
    except ValueError as error:
        raise NormError(f"{label}: {error}") from error
    # timm reads keywords only
    return functools.partial(_build, factory=factory, arguments=arguments, label=label)


def build_norm(
    spec: Norm | None, channels: int, *, where: str = "norm"
) -> nn.Module | None:
    """Build the layer of a norm; None for no norm. One that does not fit the channels is a NormError."""
    try:
        return get_norm(resolve_norm(spec, where=where), channels)
    except NormError:
        raise
    except (TypeError, ValueError) as error:  # of GroupNorm, or of a class of the user
        raise NormError(
            f"{where} ({spec!r}): does not fit {channels} channels: {first_line(error)}."
        ) from error


def _build(
    channels: int,
    *,
    factory: Callable[..., nn.Module],
    arguments: dict[str, Any],
    label: str,
    **options: Any,
) -> nn.Module:
    """Build the layer of a parsed name; ``options`` are ``device`` and ``dtype``."""
    try:
        return factory(channels, **arguments, **options)
    except ValueError as error:
        raise NormError(f"{label}: {error}") from error


def _parse(spec: str) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return the function that makes the layer, and its arguments."""
    name, _, text = spec.partition(":")
    if name not in _NORMS:
        raise ValueError(_why_unusable(name))

    factory, options = _NORMS[name]
    arguments: dict[str, Any] = {}
    items = text.split(",") if text else []
    for item in items:
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in options:
            raise ValueError(
                f"{name} has no option {key!r}. Fix: use {sorted(options)}, as in key=value."
            )
        argument, read = options[key]
        if argument in arguments:
            raise ValueError(f"option {key!r} is given twice. Fix: remove one.")
        try:
            arguments[argument] = read(value)
        except (ValueError, KeyError) as error:
            kind = _KINDS[read]
            raise ValueError(
                f"{key}={value!r} is not {kind}. Fix: give {kind}."
            ) from error

    _check_solver(options, arguments)
    return factory, arguments


def _why_unusable(name: str) -> str:
    """Return why a name has no options, or is no norm."""
    if name in _available:
        return f"{name} takes no options. Fix: write {name!r}."
    why = "not in this Detectron2" if name in DETECTRON2_NORMS else "unknown norm"
    known = norm_options()
    return f"{why}.{similar_names(name, known)} Fix: use one of {[*known]}, or '' for no norm."


def _check_solver(options: _Options, arguments: dict[str, Any]) -> None:
    """Refuse an option that the solver does not read."""
    solver = arguments.get("solver", "newton")
    for key, (argument, _) in options.items():
        reader = OPTION_SOLVER.get(argument, solver)
        if argument in arguments and reader != solver:
            raise ValueError(
                f"solver={solver} does not read {key}. Fix: remove {key}, or write solver={reader}."
            )


def norm_spec(layer: nn.Module) -> str | None:
    """Return the full norm name of a layer, or None if no name makes it.

    ``resolve_norm`` of the name makes an equal layer, except for eps and momentum of BN.
    """
    name = _name_of(layer)
    if name == "BN" or name not in _NORMS:  # Detectron2's own
        return name

    values = dict(vars(layer))
    if "solver" in values:
        values |= values["solver"].layer_arguments()
    if name == "BW" and (_ROTATED_BN | {"corr": False}).items() <= values.items():
        name = "BN"

    _, options = _NORMS[name]
    shown = []
    for key, (argument, _) in options.items():
        value = values[argument]
        is_read = OPTION_SOLVER.get(argument) in (None, values.get("solver", "newton"))
        if is_read and value != _IMPLIED.get(key):
            shown.append(f"{key}={_text(value)}")
    return f"{name}:{','.join(shown)}"


@functools.cache
def full_name(spec: str, channels: int) -> str:
    """Return the norm name with all options of a layer, of frozen norms the norm's.

    The channels may cap the groups.
    """
    with torch.device("meta"):
        layer = build_norm(spec.removeprefix("Frozen"), channels)
    if layer is None:
        raise NormError("norm (''): names no norm. Fix: give a norm name such as GW.")
    return norm_spec(layer) or spec


def _name_of(layer: nn.Module) -> str | None:
    """Return the norm name of the nearest class that a layer has, without options."""
    names = {factory: name for name, (factory, _) in _NORMS.items()} | _STOCK_CLASSES
    name = next((names[cls] for cls in type(layer).__mro__ if cls in names), None)
    if name == "naiveSyncBN" and layer._stats_mode == "N":
        return "naiveSyncBN_N"
    return name


def _text(value: Any) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value).lower()  # true and false
