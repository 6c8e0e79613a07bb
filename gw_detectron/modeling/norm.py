"""The one place that reads norm names: ``NAME`` or ``NAME:key=value,key=value``.

- ``"" BN SyncBN FrozenBN GN LN nnSyncBN naiveSyncBN`` are Detectron2's own and reach its ``get_norm`` untouched.
- ``GN:groups=16,eps=1e-5`` is GroupNorm with another number of groups.
- ``GW`` is ``GW:groups=64,iters=5,eps=1e-5,solver=newton``, Group Whitening in the published setting.
- ``BW`` is ``BW:channels=64,iters=5,eps=1e-5,solver=newton,running=matrix,momentum=0.1,sync=false,rotation=none``,
  batch whitening; ``BW:running=covariance`` is the papers' BW_Sigma, ``BW:solver=zca`` DBN. ``FrozenBW`` is its frozen
  twin.
- ``BN:rotation=cayley`` is BN with a learnable rotation of every 64 channels (``channels=64``) before scale and shift.

Whitening takes any solver of :data:`gw_detectron.layers.SOLVERS`, ``corr=true`` (standardise, then decorrelate), and
for ``zca_max`` a ``threshold``. An option that the solver does not read is an error: ``iters`` is for ``newton``.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from detectron2.layers import FrozenBatchNorm2d, get_norm
from detectron2.layers.batch_norm import NaiveSyncBatchNorm
from tabulate import tabulate
from torch import nn

from ..layers import ROTATIONS, RUNNING, SOLVERS, BatchWhitening2d, FrozenBatchWhitening2d, GroupWhitening2d
from ..ops.solvers import READ_BY

Norm = str | Callable[[int], nn.Module]

DETECTRON2_NORMS = ("", "BN", "SyncBN", "FrozenBN", "GN", "LN", "nnSyncBN", "naiveSyncBN")


class _Option(NamedTuple):
    argument: str  # the name of the factory's keyword and of the layer's attribute
    parse: Callable[[str], Any]
    allowed: str
    usual: Any = None  # a value that a full norm name need not show


class _Family(NamedTuple):
    factory: Callable[..., nn.Module]
    layer: type[nn.Module]
    options: dict[str, _Option]
    needs: str = ""  # an option that has to be given
    fixed: Mapping[str, Any] = MappingProxyType({})  # attributes by which its layers are known among those of the class


def _group_norm(num_channels: int, num_groups: int = 32, eps: float = 1e-5) -> nn.GroupNorm:
    return nn.GroupNorm(num_groups, num_channels, eps)


def _checked(convert: Callable[[str], Any], accept: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = convert(text)
        if not accept(value):
            raise ValueError
        return value

    return parse


def _one_of(argument: str, names: Iterable[str], usual: str | None = None) -> _Option:
    return _Option(argument, _checked(str, set(names).__contains__), f"one of {sorted(names)}", usual)


def _switch(argument: str) -> _Option:
    return _Option(argument, {"true": True, "false": False}.__getitem__, "true or false", False)


_GROUPS = _Option("num_groups", _checked(int, lambda groups: groups >= 1), "a positive integer")
_CHANNELS = _Option("channels_per_group", _checked(int, lambda channels: channels >= 1), "a positive integer")
_EPS = _Option("eps", _checked(float, lambda eps: 0 <= eps < float("inf")), "zero or a positive number")
_FRACTION = _checked(float, lambda value: 0 <= value <= 1)
_MOMENTUM = _Option("momentum", _FRACTION, "a number from 0 to 1")
_ROTATION = _one_of("rotation", ROTATIONS, usual="none")
_SOLVER = {
    "iters": _Option("num_iters", _checked(int, lambda iters: iters >= 0), "zero or a positive integer"),
    "eps": _EPS,
    "solver": _one_of("solver", SOLVERS),
    "threshold": _Option("threshold", _FRACTION, "a number from 0 to 1", 0.01),
    "corr": _switch("corr"),
}
_BW_OPTIONS = {
    "channels": _CHANNELS,
    **_SOLVER,
    "running": _one_of("running", RUNNING),
    "momentum": _MOMENTUM,
    "sync": _switch("sync"),
    "rotation": _ROTATION,
}
# BN as batch whitening: its matrix standardises, its running covariance has BN's running variance on the diagonal
_AS_BN: dict[str, Any] = {"solver": "standardize", "running": "covariance"}
# from the most derived and most special to the most general
_FAMILIES = {
    "GN": _Family(_group_norm, nn.GroupNorm, {"groups": _GROUPS, "eps": _EPS}),
    "GW": _Family(GroupWhitening2d, GroupWhitening2d, {"groups": _GROUPS, **_SOLVER}),
    "FrozenBW": _Family(FrozenBatchWhitening2d, FrozenBatchWhitening2d, _BW_OPTIONS),
    "BN": _Family(
        functools.partial(BatchWhitening2d, **_AS_BN),
        BatchWhitening2d,
        {
            "channels": _CHANNELS,
            "eps": _EPS,
            "momentum": _MOMENTUM,
            "sync": _switch("sync"),
            "rotation": _one_of("rotation", ["cayley"]),
        },
        needs="rotation",
        fixed={**_AS_BN, "rotation": "cayley", "corr": False},
    ),
    "BW": _Family(BatchWhitening2d, BatchWhitening2d, _BW_OPTIONS),
}

# from the most derived class to its base
_DETECTRON2_LAYERS = (
    ("naiveSyncBN", NaiveSyncBatchNorm),
    ("SyncBN", nn.SyncBatchNorm),
    ("BN", nn.BatchNorm2d),
    ("FrozenBN", FrozenBatchNorm2d),
)


def resolve_norm(spec: str | None, *, where: str = "norm", channels: Iterable[int] = ()) -> Norm:
    """Turns a norm name into what Detectron2's ``get_norm`` and component constructors accept.

    Args:
        spec: the name, see the head of this module. None is no norm, as in Detectron2.
        where: what to call the place in an error, e.g. ``"MODEL.FPN.NORM"``.
        channels: channel counts the norm is going to be used with; each is tried here, so that a misfit is reported
            with its place instead of from inside a constructor.

    Returns:
        One of Detectron2's names unchanged, or a ``functools.partial`` that takes the channel count.

    Raises:
        ValueError: unknown name, key or value, or channels that the groups do not divide.
    """
    try:
        norm = _parse(spec or "")
        for count in sorted(set(channels)):
            try:
                get_norm(norm, count)
            except ValueError as error:
                raise ValueError(f"it does not fit a layer of {count} channels: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}={spec!r}: {error}") from error
    return norm


def _parse(spec: str) -> Norm:
    if not isinstance(spec, str):
        raise ValueError("a norm is given by its name, a text such as 'GW'")
    if spec in DETECTRON2_NORMS:
        return _known_to_detectron2(spec)
    name, _, option_text = spec.partition(":")
    if name not in _FAMILIES:
        if name and name in DETECTRON2_NORMS:
            raise ValueError(f"{name} takes no options; write {name!r}")
        names = sorted({*DETECTRON2_NORMS, *_FAMILIES} - {""})
        raise ValueError(f"unknown norm {name!r}; allowed are {names}, or an empty string for no norm")
    family = _FAMILIES[name]
    arguments: dict[str, Any] = {}
    for item in option_text.split(",") if option_text else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in family.options:
            raise ValueError(f"{name} has no option {key!r}; allowed are {sorted(family.options)}, as in 'key=value'")
        option = family.options[key]
        if option.argument in arguments:
            raise ValueError(f"option {key!r} is given twice")
        try:
            arguments[option.argument] = option.parse(value)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{key}={value!r} is not {option.allowed}") from error
    if family.needs and family.options[family.needs].argument not in arguments:
        option = family.options[family.needs]
        raise ValueError(
            f"{name} takes options only together with {family.needs}, {option.allowed}; without them write {name!r}"
        )
    solver = arguments.get("solver", "newton")
    for key, option in family.options.items():
        reader = READ_BY.get(option.argument, solver)
        if option.argument in arguments and reader != solver:
            raise ValueError(f"solver={solver} does not read {key}; remove it or write solver={reader}")
    return functools.partial(family.factory, **arguments)


def _known_to_detectron2(name: str) -> str:
    try:
        get_norm(name, 32)
    except KeyError as error:
        raise ValueError(f"the installed Detectron2 does not know {name!r}; use another norm or a newer one") from error
    return name


def norm_spec(layer: nn.Module) -> str:
    """The full norm name of a layer, so that ``resolve_norm(norm_spec(layer))`` makes an equal layer.

    A ReLU that the layer applies has no part in the name: it belongs to the place.

    Raises:
        ValueError: the layer is not a normalisation that a name can express.
    """
    for name, family in _FAMILIES.items():
        if isinstance(layer, family.layer) and all(
            _argument(layer, key) == value for key, value in family.fixed.items()
        ):
            shown = []
            for key, option in family.options.items():
                value, reader = _argument(layer, option.argument), READ_BY.get(option.argument)
                if value != option.usual and (reader is None or layer.solver.name == reader):
                    shown.append(f"{key}={_text(value)}")
            return f"{name}:{','.join(shown)}"
    for name, layer_class in _DETECTRON2_LAYERS:
        if isinstance(layer, layer_class):
            return name
    if type(layer).__name__ == "LayerNorm":  # Detectron2's own channels-first class, absent from its older versions
        return "LN"
    raise ValueError(f"{type(layer).__name__} is not a normalisation layer that a norm name can express")


def _argument(layer: Any, name: str) -> Any:
    """Return the value that a layer's constructor was given for an argument."""
    options = layer.solver.layer_arguments() if hasattr(layer, "solver") else {}
    return options[name] if name in options else getattr(layer, name)


def in_evaluation(spec: str) -> str:
    """What is left of a full norm name where nothing is trained: frozen or synchronised statistics are statistics."""
    name, _, options = spec.removeprefix("Frozen").partition(":")
    kept = [option for option in options.split(",") if not option.startswith(("momentum=", "sync="))]
    return ":".join(["BN" if name.endswith("BN") else name, ",".join(kept)])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if type(value)(short) == value else repr(value)


class NormRow(NamedTuple):
    """One normalisation layer of a model."""

    layer: str
    spec: str
    channels: int
    groups: int | None
    parameters: int
    frozen: bool


def norm_rows(model: nn.Module) -> list[NormRow]:
    """Lists every normalisation layer of a model in the order of its modules."""
    rows = []
    for name, module in model.named_modules():
        try:
            spec = norm_spec(module)
        except ValueError:
            continue
        parameters = list(module.parameters())
        rows.append(
            NormRow(
                layer=name,
                spec=spec,
                channels=_channels(module),
                groups=getattr(module, "num_groups", None),
                parameters=sum(p.numel() for p in parameters),
                frozen=not any(p.requires_grad for p in parameters),
            )
        )
    return rows


def _channels(layer: nn.Module) -> int:
    for attribute in ("num_channels", "num_features"):
        if hasattr(layer, attribute):
            return int(getattr(layer, attribute))
    return sum(parameter.numel() for parameter in layer.parameters()) // 2  # LN: scale and shift


def norm_summary(model: nn.Module) -> str:
    """How many layers of a model have which norm, in a line."""
    counts = Counter(row.spec for row in norm_rows(model))
    return ", ".join(f"{count} {spec}" for spec, count in counts.most_common()) or "none"


def norm_table(model: nn.Module) -> str:
    """A text table of every normalisation layer: its norm name, channels, groups, parameters, frozen or not."""
    rows = [(*row[:-1], "yes" if row.frozen else "no") for row in norm_rows(model)]
    return tabulate(rows, headers=["layer", "norm", "channels", "groups", "parameters", "frozen"], missingval="-")
