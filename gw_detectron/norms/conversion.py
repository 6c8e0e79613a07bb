"""Replace the norm layers of a built model, and standardize its convolutions, in place."""

import contextlib
import fnmatch
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import ConfigError, NormError
from ..layers import GroupWhitening2d, WeightStandardized, standardize_weights
from ..layers.mixed_norms import MixedNorm
from .listing import evaluation_spec, is_norm, norm_rows, norm_summary
from .names import Norm, build_norm
from .positions import POSITIONS, norms_at
from .replacement import describe, has_channels_last, loses_statistics, replacement

Plan = str | Mapping[str | type[nn.Module], Norm | None]
#: names of convolutions: plain, and with Weight Standardization
CONVS = ("", "WS")
_WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
)
# warnings of layers
_ONE_VALUE = (
    "get one channel per group: if their input is (N, C), a group has one value, and the output is only the shift. "
    "Fix: keep them, by None in the plan, or use fewer groups, e.g. 'GW:groups=8'."
)
_OWN_STATISTICS = (
    "mix in the image's statistics: if their input is (N, C), a value is its own mean, and its variance is 0. Fix: "
    "keep them, by None in the plan."
)
_LOST_STATISTICS = (
    "lose their running statistics; expect low accuracy until you fine-tune."
)
_UNTRAINED = (
    "have the statistics of a new BN, mean 0 and variance 1: they were not trained, or are multiplied into the scale, "
    "as in Caffe2's weights. Fix: load weights with BN's statistics first."
)


class ConvertedLayer(NamedTuple):
    """Old and new norm of one layer."""

    layer: str
    before: str
    after: str  # equal to ``before`` if it was kept


class ConversionReport(NamedTuple):
    """What became of every norm layer of a model, in module order and under the first of its names."""

    layers: tuple[ConvertedLayer, ...]

    def __str__(self) -> str:
        changed = [row for row in self.layers if row.after != row.before]
        lines = [f"{row.layer}: {row.before} -> {row.after}" for row in changed]
        lines.append(f"{len(changed)} of {len(self.layers)} norm layers converted")
        return "\n".join(lines)


def convert_norms(model: nn.Module, plan: Plan) -> ConversionReport:
    """Replace norm layers of a model by the norms of a plan, in place.

    Scale and shift, frozen parameters, device, dtype and mode are kept; running statistics, eps and momentum where one
    BN layer replaces another. Batch whitening starts from the variances of BN. FrozenBN has no parameters: the layer
    that replaces it is trainable. A layer that contains its activation (timm's ``BatchNormAct2d``) keeps it. Hooks of
    a layer are lost.

    Weights that were trained with BN do not fit a per-sample norm: the model needs training afterwards. MixGW and
    MixBN keep BN's statistics and mix in the image's.

    .. code-block:: python

        report = convert_norms(torchvision.models.resnet50(), {"S1-B2": "GW", "*": "GN"})

    Args:
        model: any model that is not scripted or wrapped for several processes.
        plan: norm names (see :mod:`gw_detectron.norms.names`) by glob patterns of module names, by layer classes, or by
            one of the paper's positions in a ResNet. The first key of the plan that fits a layer counts. None keeps a
            layer. ``"S1-B2"`` as the whole plan is ``{"S1-B2": "GW"}``.

    Returns:
        What became of each norm layer.

    Raises:
        NormError: a key fits no norm layer, a layer contains an activation that its successor lacks, or the model
            cannot be changed.
        NormError, ConfigError: a norm is unknown or does not fit a layer, or positions are unknown.
    """
    _check_model(model)
    layers = {name: module for name, module in model.named_modules() if is_norm(module)}
    before = {name: describe(layer) for name, layer in layers.items()}

    new = _replacements(layers, _specs(model, layers, plan))
    old = {name: layers[name] for name in new}
    _check_lists(model, old)
    _warn(old, new)

    _replace(model, {old[name]: layer for name, layer in new.items()})
    after = before | {name: describe(layer) for name, layer in new.items()}
    rows = [ConvertedLayer(name, before[name], after[name]) for name in layers]
    return ConversionReport(tuple(rows))


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise NormError(
                f"convert_norms, {name or 'the model'}: is scripted or traced, which fixes its layers. Fix: convert "
                "the model that it was made of, then use torch.jit.trace or torch.export."
            )
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(is_lazy, own)):
            raise NormError(
                f"convert_norms, {name} ({type(module).__name__}): its channels are not known yet. Fix: run the model "
                "once first."
            )
        classes = {cls.__name__ for cls in type(module).__mro__}
        if not classes.isdisjoint(_WRAPPERS):
            raise NormError(
                f"convert_norms, {name or 'the model'} ({type(module).__name__}): shares its parameters with other "
                "processes. Fix: convert the model first."
            )

    if is_norm(model):
        raise NormError(
            "convert_norms: the model is a norm layer itself. Fix: build the other norm."
        )


def _specs(
    model: nn.Module, layers: Mapping[str, nn.Module], plan: Plan
) -> dict[str, Norm | None]:
    """Return the norm name of each layer that the plan names."""
    if isinstance(plan, str):
        plan = {plan: "GW"}
    if not isinstance(plan, Mapping):
        raise NormError(
            f"convert_norms, plan ({plan!r}): neither positions nor a dict. Fix: give e.g. {{'*': 'GW'}}, which gives "
            "all layers GW."
        )

    specs: dict[str, Norm | None] = {}
    for key, spec in plan.items():
        fitting = _fitting(key, model, layers)
        if not fitting:
            raise NormError(
                f"convert_norms, plan ({key!r}): fits none of {len(layers)} norm layers. Fix: use a layer class, one "
                f"of {list(POSITIONS[1:])} or a pattern of names such as {list(layers)[:3]}; "
                "{'*': 'GW'} gives all layers GW."
            )
        if specs.keys() >= set(fitting):
            raise NormError(
                f"convert_norms, plan ({key!r}): earlier keys fit all of its layers. Fix: put it before them."
            )
        for name in fitting:
            specs.setdefault(name, spec)
    return specs


def _fitting(
    key: str | type[nn.Module], model: nn.Module, layers: Mapping[str, nn.Module]
) -> list[str]:
    """Return the names of the layers that a key of a plan fits."""
    if isinstance(key, type):
        return [name for name, layer in layers.items() if isinstance(layer, key)]
    if not isinstance(key, str):
        raise NormError(
            f"convert_norms, plan ({key!r}): neither a string nor a layer class. Fix: give each its own key."
        )
    if key in POSITIONS:
        return norms_at(key, layers, where="convert_norms")

    every_name = dict(model.named_modules(remove_duplicate=False))
    chosen = {every_name[name] for name in fnmatch.filter(every_name, key)}
    return [name for name, layer in layers.items() if layer in chosen]


def _replacements(
    layers: Mapping[str, nn.Module], specs: Mapping[str, Norm | None]
) -> dict[str, nn.Module]:
    """Build the new layers; those that equal the old ones are left out."""
    wanted = {name: spec for name, spec in specs.items() if spec is not None}
    last = [name for name in wanted if has_channels_last(layers[name])]
    if last:
        patterns = dict.fromkeys(re.sub(r"\d+\.", "*.", name) for name in last)
        raise NormError(
            f"convert_norms, {last[0]} ({type(layers[last[0]]).__name__!r}): its channels are the last dimension. Fix: "
            f"start the plan with {patterns}, which keeps the {len(last)} such layers."
        )

    changed = {}
    for name, spec in wanted.items():
        old = layers[name]
        new = replacement(name, old, spec)
        if describe(new) != describe(old):
            changed[name] = new
    return changed


def _check_lists(model: nn.Module, old: Mapping[str, nn.Module]) -> None:
    """Refuse layers that a module also keeps outside of its submodules, e.g. in a list, which keeps the old layer."""
    names = {id(layer): name for name, layer in old.items()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules":
                continue
            for kept in _contents(value):
                if id(kept) in names:
                    place = f"{path}.{attribute}".removeprefix(".")
                    raise NormError(
                        f"convert_norms, {names[id(kept)]}: {place} (a plain {type(value).__name__}) holds it too, "
                        "and would keep the old layer. Fix: use torch.nn.ModuleList or torch.nn.ModuleDict, or assign "
                        "it as a submodule."
                    )


def _contents(value: object) -> Iterator[object]:
    """Yield a value and what is in it, if it is a list, tuple or dictionary."""
    yield value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _contents(item)


def _warn(old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    """Warn of layers that may give a constant, or that lose what was trained."""
    warned = defaultdict(list)
    for name, layer in new.items():
        is_1d = type(old[name]).__name__.endswith("1d")
        if is_1d and _has_single_channels(layer):
            warned[_ONE_VALUE].append(name)
        if is_1d and isinstance(layer, MixedNorm) and any(layer.mixture):
            warned[_OWN_STATISTICS].append(name)
        if loses_statistics(old[name], layer):
            warned[_LOST_STATISTICS].append(name)
        if isinstance(layer, MixedNorm) and layer.is_untrained:
            warned[_UNTRAINED].append(name)

    for text, names in warned.items():
        warnings.warn(
            f"convert_norms: {len(names)} layers ({names[0]}, ...) {text}", stacklevel=3
        )


def _has_single_channels(layer: nn.Module) -> bool:
    return (
        isinstance(layer, GroupWhitening2d) and layer.num_groups == layer.num_channels
    )


def _replace(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> None:
    """Put other layers into the place of layers, under all of their names."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in replacements:
                module._modules[name] = replacements[child]


def convert_convs(
    model: nn.Module, conv: str, pattern: str = "*", *, where: str = "conv"
) -> list[str]:
    """Convert the convolutions of a model by name, in place.

    Args:
        model, pattern: as of :func:`gw_detectron.layers.standardize_weights`, which this calls.
        conv: ``"WS"`` for Weight Standardization; ``""`` changes nothing.
        where: the place that an error message names, e.g. ``"MODEL.FPN.CONV"``.

    Returns:
        The names of the converted convolutions.

    Raises:
        ConfigError: an unknown name, or no convolution that it fits.
    """
    if conv not in CONVS:
        raise ConfigError(
            f"{where} ({conv!r}): unknown convolution. Fix: use one of {list(CONVS)}."
        )
    if not conv:
        return []
    try:
        return standardize_weights(model, pattern)
    except ValueError as error:
        raise ConfigError(f"{where} ({conv!r}): {error}") from error


def conv_names(model: nn.Module) -> dict[str, str]:
    """Return the names (``"WS"``) of the convolutions of a model that are not plain, by module name."""
    modules = model.named_modules()
    standardized = [
        name for name, module in modules if isinstance(module, WeightStandardized)
    ]
    return dict.fromkeys(standardized, "WS")


def mixture_name(mixture: float | str, *, where: str) -> str:
    """Return the norm name of a mixture: of a number, MixBN with this ``alpha``; other norms are a NormError."""
    spec = str(mixture)
    with contextlib.suppress(ValueError):
        spec = f"MixBN:alpha={float(spec):g}"
    if not spec.startswith("Mix"):
        raise NormError(
            f"{where} ({mixture!r}): neither a number nor MixGW or MixBN. Fix: give e.g. 0.5."
        )
    build_norm(spec, 1, where=where)  # names the place of a wrong value
    return spec


def mix_statistics(model: nn.Module, mixture: float | str, *, where: str) -> int:
    """Mix the image's statistics into the BN and FrozenBN layers of a trained model, in place.

    Args:
        model: a backbone. BN layers of heads see regions, whose statistics are others.
        mixture: a norm name, MixGW or MixBN with options, or a number: the ``alpha`` of MixBN.
        where: the place that an error message names.

    Returns:
        The number of layers.

    Raises:
        NormError: another norm name, or no BN layer.
    """
    spec = mixture_name(mixture, where=where)
    names = [
        row.layer for row in norm_rows(model) if evaluation_spec(row.spec) == "BN:"
    ]
    if not names:
        raise NormError(
            f"{where} ({mixture!r}): the backbone has no BN layers ({norm_summary(model)}), whose statistics could be "
            "mixed."
        )
    convert_norms(model, dict.fromkeys(names, spec))
    return len(names)
