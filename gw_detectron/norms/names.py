"""Parse and print norm names: ``NAME`` or ``NAME:key=value,key=value``.

- ``"" BN SyncBN FrozenBN GN LN nnSyncBN naiveSyncBN`` and any other name that Detectron2's ``get_norm`` knows are
  passed on to it. Without Detectron2, ``"" BN SyncBN GN`` are torch's layers, and ``FrozenBN`` is torchvision's.
- ``GN:groups=16,eps=1e-5`` is GroupNorm with another number of groups.
- ``GW`` is ``GW:groups=64,iters=5,eps=1e-5,solver=newton``, Group Whitening with the published setting.
- ``BW`` is ``BW:channels=64,iters=5,eps=1e-5,solver=newton,running=matrix,momentum=0.1,sync=false,rotation=none``,
  batch whitening. ``BW:running=covariance`` is the papers' BW_Sigma. ``BW:solver=zca`` is DBN, whose released code has
  16 channels and eps 1e-3 by default. ``FrozenBW`` is batch whitening with fixed statistics.
- ``BN:rotation=cayley`` is BN with a learnable rotation of every 64 channels (``channels=64``) before scale and shift.
- ``BRN`` is ``BRN:momentum=0.01,rmax=3,dmax=5,warmup=5000,rmax_at=40000,dmax_at=25000``, Batch Renormalization.

``solver`` is a name in :data:`gw_detectron.layers.SOLVERS`. ``corr=true`` standardizes, then decorrelates.
``threshold`` belongs to the solver ``zca_max``, ``iters`` to ``newton``; with another solver they are errors.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import NormError, similar_names
from ..installation import has_detectron2
from ..layers import BatchRenorm2d, BatchWhitening2d, FrozenBatchWhitening2d, GroupWhitening2d
from ..ops.solvers import OPTION_SOLVER
from .installed import CLASSES, Norm, get_norm

#: Detectron2's norm names; older versions lack some of them
DETECTRON2_NORMS = ("BN", "SyncBN", "FrozenBN", "GN", "LN", "nnSyncBN", "naiveSyncBN", "naiveSyncBN_N")


def _group_norm(num_channels: int, num_groups: int = 32, eps: float = 1e-5, **tensor_options: Any) -> nn.GroupNorm:
    if num_groups < 1 or not 0 <= eps < float("inf"):  # torch accepts both
        why = "expected groups of at least 1 and a finite eps of at least 0"
        raise ValueError(f"groups ({num_groups}), eps ({eps}): {why}. Fix: try groups=32,eps=1e-5.")
    return nn.GroupNorm(num_groups, num_channels, eps, **tensor_options)


def _rotated_batch_norm(num_channels: int, rotation: str = "none", **arguments: Any) -> BatchWhitening2d:
    """Make BN with a rotation.

    It is batch whitening that standardizes, with BN's running variance.
    """
    if rotation != "cayley":
        raise ValueError("BN takes options only with rotation=cayley. Fix: add rotation=cayley, or write 'BN'.")
    return BatchWhitening2d(num_channels, **_ROTATED_BN, **arguments)


_ROTATED_BN: dict[str, Any] = {"solver": "standardize", "running": "covariance", "rotation": "cayley"}
_Options = dict[str, tuple[str, type]]  # option -> argument of the factory and its type
_GROUPS: _Options = {"groups": ("num_groups", int)}
_CHANNELS: _Options = {"channels": ("channels_per_group", int)}
_EPS: _Options = {"eps": ("eps", float)}
_SOLVER: _Options = {
    "iters": ("num_iters", int),
    **_EPS,
    "solver": ("solver", str),
    "threshold": ("threshold", float),
    "corr": ("corr", bool),
}
_BATCH_OPTIONS: _Options = {"momentum": ("momentum", float), "sync": ("sync", bool), "rotation": ("rotation", str)}
_BW = _CHANNELS | _SOLVER | {"running": ("running", str)} | _BATCH_OPTIONS
_BRN: _Options = {"momentum": ("momentum", float), "rmax": ("rmax", float), "dmax": ("dmax", float)} | {
    key: (key, int) for key in ("warmup", "rmax_at", "dmax_at")
}
_NORMS: dict[str, tuple[Callable[..., nn.Module], _Options]] = {
    "GN": (_group_norm, _GROUPS | _EPS),
    "GW": (GroupWhitening2d, _GROUPS | _SOLVER),
    "BW": (BatchWhitening2d, _BW),
    "FrozenBW": (FrozenBatchWhitening2d, _BW),
    "BN": (_rotated_batch_norm, _CHANNELS | _EPS | _BATCH_OPTIONS),
    "BRN": (BatchRenorm2d, _BRN),
}
_TYPES = {int: "an integer below 2^31", float: "a number", bool: "true or false"}
#: options that a printed name shows only if they differ from these values
_IMPLIED = {"threshold": 0.01, "corr": False, "sync": False, "rotation": "none"}
#: layer classes and their names; a subclass comes before its base
_LAYERS: dict[str, Any] = {
    "FrozenBW": FrozenBatchWhitening2d,
    "BW": BatchWhitening2d,
    "GW": GroupWhitening2d,
    "GN": nn.GroupNorm,
    "BRN": BatchRenorm2d,
    **CLASSES,
}


def norm_options() -> dict[str, list[str]]:
    """Return the norm names that exist here, sorted, and the options of each."""
    names = sorted({*filter(_detectron2_knows, DETECTRON2_NORMS), *_NORMS})
    return {name: [*_NORMS[name][1]] if name in _NORMS else [] for name in names}


def resolve_norm(spec: Norm | None, *, where: str = "norm", channels: Iterable[int] = ()) -> Norm:
    """Turn a norm name into an argument of Detectron2's ``get_norm``.

    Args:
        spec: the norm name, see the head of this module. None is no norm, as in Detectron2. A function or class that
            takes the channel count is returned as it is.
        where: the place that an error message names, e.g. ``"MODEL.FPN.NORM"``.
        channels: channel counts that the norm must fit.

    Returns:
        One of Detectron2's names unchanged, or a ``functools.partial`` that takes the channel count.

    Raises:
        NormError: unknown name, option or value, or channels that the groups do not divide.
    """
    try:
        norm = _parse("" if spec is None else spec)
        counts = sorted(set(channels))
        for count in counts:
            _build(norm, count, counts)
    except ValueError as error:
        raise NormError(f"{where} ({spec!r}): {error}") from error
    return norm


def _build(norm: Norm, channels: int, counts: Sequence[int] = ()) -> None:
    """Build a layer on the meta device to run its checks.

    Args:
        norm: of the layer.
        channels: of the layer.
        counts: those of all layers with this norm, for messages.
    """
    try:
        with torch.device("meta"):
            get_norm(norm, channels)
    except TypeError as error:
        if isinstance(norm, str):
            raise
        fix = "give a function of it, e.g. functools.partial(nn.GroupNorm, 32), or a name such as 'GN'"
        raise ValueError(f"cannot be built from the number of channels alone: {error}. Fix: {fix}.") from error
    except ValueError as error:
        text = str(error)
        if "Fix: " not in text:  # torch's GroupNorm
            text = f"{error}. Fix: use groups that divide {channels}."
        if len(counts) > 1 and "divi" in text:
            text += f" All layers of this norm: groups that divide {math.gcd(*counts)}."
        raise ValueError(text) from error


def _parse(spec: object) -> Norm:
    if isinstance(spec, nn.Module):
        raise ValueError("is a layer, not a kind of layers. Fix: give a name such as 'GW', or a class.")
    if callable(spec):
        return spec
    if not isinstance(spec, str):
        raise ValueError("a norm is named by a string. Fix: give a string such as 'GW'.")
    name, colon, option_text = spec.partition(":")
    if not colon and _detectron2_knows(name):
        return spec
    if name not in _NORMS:
        if colon and _detectron2_knows(name):
            raise ValueError(f"{name} takes no options. Fix: write {name!r}.")
        why = "unknown norm"
        if name in DETECTRON2_NORMS:
            why = "unknown to the installed Detectron2" if has_detectron2() else "needs Detectron2"
        similar = similar_names(name, norm_options())
        raise ValueError(f"{why}.{similar} Fix: use one of {[*norm_options()]}, or '' for no norm.")
    factory, options = _NORMS[name]
    arguments: dict[str, Any] = {}
    for item in option_text.split(",") if option_text else []:
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in options:
            raise ValueError(f"{name} has no option {key!r}. Fix: use {sorted(options)}, as in key=value.")
        argument, kind = options[key]
        if argument in arguments:
            raise ValueError(f"option {key!r} is given twice. Fix: remove one.")
        arguments[argument] = _convert(key, text, kind)
    solver = arguments.get("solver", "newton")
    for key, (argument, _) in options.items():
        reader = OPTION_SOLVER.get(argument, solver)
        if argument in arguments and reader != solver:
            raise ValueError(f"solver={solver} does not read {key}. Fix: remove {key}, or write solver={reader}.")
    norm = functools.partial(factory, **arguments)
    _build(norm, max(1, arguments.get("num_groups", 64)))
    return norm


def _convert(key: str, text: str, kind: type) -> Any:
    try:
        value = {"true": True, "false": False}[text] if kind is bool else kind(text)
        if kind is int and abs(value) >= 2**31:  # torch has no such sizes
            raise ValueError
    except (ValueError, KeyError) as error:
        raise ValueError(f"{key}={text!r} is not {_TYPES[kind]}. Fix: give {_TYPES[kind]}.") from error
    return value


def _detectron2_knows(name: str) -> bool:
    try:
        get_norm(name, 32)
    except KeyError:
        return False
    return True


def norm_spec(layer: nn.Module) -> str:
    """Return the full norm name of a layer.

    ``resolve_norm`` of the name makes an equal layer, except for eps and momentum of BN.

    Raises:
        NormError: no norm name makes this layer.
    """
    spec = find_norm_spec(layer)
    if spec is None:
        raise NormError(f"layer ({type(layer).__name__!r}): no norm name makes it. Fix: give one of {[*_LAYERS]}.")
    return spec


def find_norm_spec(layer: nn.Module) -> str | None:
    """Return the full norm name of a layer, or None."""
    known = (name for name, layer_class in _LAYERS.items() if isinstance(layer, layer_class))
    name = next(known, None)
    if name == "naiveSyncBN" and getattr(layer, "_stats_mode", "") == "N":
        return "naiveSyncBN_N"
    if name == "BN" or name not in _NORMS:  # Detectron2's own
        return name
    solver: Any = getattr(layer, "solver", None)
    values = vars(layer) | (solver.layer_arguments() if solver else {})
    if name == "BW" and (_ROTATED_BN | {"corr": False}).items() <= values.items():
        name = "BN"
    shown = [
        f"{key}={_text(values[argument])}"
        for key, (argument, _) in _NORMS[name][1].items()
        if values[argument] != _IMPLIED.get(key) and OPTION_SOLVER.get(argument) in (None, values.get("solver"))
    ]
    return f"{name}:{','.join(shown)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
