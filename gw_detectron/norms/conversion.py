"""Replace the norm layers of a built model, and standardize its convolutions, in place."""

import fnmatch
import re
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from ..errors import ConfigError, NormError
from ..layers import GroupWhitening2d, WeightStandardized, standardize_weights
from .listing import channels_of
from .names import Norm, norm_options
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

    Weights that were trained with BN do not fit a per-sample norm: the model needs training afterwards.

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
    layers = {name: module for name, module in model.named_modules() if channels_of(module)}
    before = {name: describe(layer) for name, layer in layers.items()}
    new = _replacements(layers, _specs(model, layers, plan))
    old = {name: layers[name] for name in new}
    _check_lists(model, old)
    _warn(old, new)
    replacements = {id(old[name]): layer for name, layer in new.items()}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in replacements:
                module._modules[name] = replacements[id(child)]
    rows = [
        ConvertedLayer(name, spec, describe(new[name]) if name in new else spec)
        for name, spec in before.items()
    ]
    return ConversionReport(tuple(rows))


def _check_model(model: nn.Module) -> None:
    if channels_of(model):
        raise NormError(
            "convert_norms: the model is a norm layer itself. Fix: build the other norm."
        )
    for name, module in model.named_modules():
        if any(cls.__name__ in _WRAPPERS for cls in type(module).__mro__):
            raise NormError(
                f"convert_norms, {name or 'the model'} ({type(module).__name__}): shares its parameters with other "
                "processes. Fix: convert the model first."
            )
        if isinstance(module, nn.modules.batchnorm._LazyNormBase):
            raise NormError(
                f"convert_norms, {name or 'the model'} ({type(module).__name__}): has no channels yet. Fix: run one "
                "batch first."
            )


def _specs(
    model: nn.Module, layers: Mapping[str, nn.Module], plan: Plan
) -> dict[str, Norm | None]:
    """Return the norm name of each layer that the plan names."""
    names = {id(layer): name for name, layer in layers.items()}
    aliases = {
        name: names[id(m)]
        for name, m in model.named_modules(remove_duplicate=False)
        if id(m) in names
    }
    found: dict[str, Norm | None] = {}
    for key, spec in ({plan: "GW"} if isinstance(plan, str) else plan).items():
        if isinstance(key, type):
            fitting = [name for name, layer in layers.items() if isinstance(layer, key)]
        elif key in POSITIONS:
            fitting = norms_at(key, layers, where="convert_norms")
        else:
            fitting = [aliases[name] for name in fnmatch.filter(aliases, key)]
        if not fitting:
            fix = f"use a layer class, one of {list(POSITIONS[1:])} or a pattern of names such as {list(layers)[:3]}"
            if plan == key and key.partition(":")[0] in norm_options():
                fix = f'give this norm to layers, e.g. {{"*": {key!r}}} to all'
            raise NormError(
                f"convert_norms, plan ({key!r}): fits none of {len(layers)} norm layers. Fix: {fix}."
            )
        if all(name in found for name in fitting):
            raise NormError(
                f"convert_norms, plan ({key!r}): earlier keys fit all of its layers. Fix: put it before them."
            )
        for name in fitting:
            found.setdefault(name, spec)
    return found


def _replacements(
    layers: Mapping[str, nn.Module], specs: Mapping[str, Norm | None]
) -> dict[str, nn.Module]:
    """Build the new layers; those that equal the old ones are left out."""
    wanted = {name: spec for name, spec in specs.items() if spec is not None}
    if last := [name for name in wanted if has_channels_last(layers[name])]:
        patterns = dict.fromkeys(re.sub(r"\d+\.", "*.", name) for name in last)
        raise NormError(
            f"convert_norms, {last[0]} ({type(layers[last[0]]).__name__!r}): its channels are the last dimension. Fix: "
            f"start the plan with {patterns}, which keeps the {len(last)} such layers."
        )
    built = {name: replacement(name, layers[name], spec) for name, spec in wanted.items()}
    return {
        name: layer
        for name, layer in built.items()
        if describe(layer) != describe(layers[name])
    }


def _check_lists(model: nn.Module, old: Mapping[str, nn.Module]) -> None:
    """Refuse layers that a module also keeps outside of its submodules, e.g. in a list, which keeps the old layer."""
    names = {id(layer): name for name, layer in old.items()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            held, seen = [] if attribute == "_modules" else [value], set()
            for kept in held:  # which grows by what is inside
                if id(kept) in names:
                    raise NormError(
                        f"convert_norms, {names[id(kept)]}: {path and path + '.'}{attribute} (a plain "
                        f"{type(value).__name__}) holds it too, and would keep the old layer. Fix: use "
                        "torch.nn.ModuleList or torch.nn.ModuleDict, or assign it as a submodule."
                    )
                if isinstance(kept, (list, tuple, dict)) and id(kept) not in seen:
                    seen.add(id(kept))
                    held.extend(kept.values() if isinstance(kept, dict) else kept)


def _warn(old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    """Warn of layers that may give a constant, or that lose what was trained."""
    vectors = [
        name
        for name, layer in new.items()
        if isinstance(layer, GroupWhitening2d)
        and layer.num_groups == layer.num_channels
        and type(old[name]).__name__.endswith("1d")
    ]
    if vectors:
        warnings.warn(
            f"convert_norms: {len(vectors)} layers ({vectors[0]}, ...) get one channel per group: if their input is "
            "(N, C), a group has one value, and the output is only the shift. Fix: keep them, by None in the plan, or "
            "use fewer groups, e.g. 'GW:groups=8'.",
            stacklevel=3,
        )
    if trained := [name for name, layer in old.items() if loses_statistics(layer, new[name])]:
        warnings.warn(
            f"convert_norms: {len(trained)} layers ({trained[0]}, ...) lose their running statistics; expect low "
            "accuracy until you fine-tune.",
            stacklevel=3,
        )


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
    try:
        return standardize_weights(model, pattern) if conv else []
    except ValueError as error:
        raise ConfigError(f"{where} ({conv!r}): {error}") from error


def conv_names(model: nn.Module) -> dict[str, str]:
    """Return the names (``"WS"``) of the convolutions of a model that are not plain, by module name."""
    return {
        name: "WS"
        for name, module in model.named_modules()
        if isinstance(module, WeightStandardized)
    }
