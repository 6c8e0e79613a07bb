"""Replace the norm layers of a built model, in place."""

import fnmatch
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConversionError, summarize_names
from ..layers import GroupWhitening2d
from .names import norm_options, resolve_norm
from .norm_listing import channels_of
from .positions import POSITIONS, norms_at
from .replacement import describe, has_channels_last, keeps_statistics, replacement, uses_batch_statistics_alone

Plan = str | Mapping[str | type[nn.Module], str | None]


class ConvertedLayer(NamedTuple):
    """What became of a norm layer."""

    layer: str
    before: str
    after: str  # equal to ``before`` if it was kept


class ConversionReport(NamedTuple):
    """What became of every norm layer of a model.

    Args:
        layers: in module order; a layer that is used under several names is listed under its first.
    """

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
        model: any model that is not scripted, quantized or wrapped for several processes.
        plan: norm names (see :mod:`gw_detectron.norms.names`) by glob patterns of module names, by layer classes, or by
            one of the paper's positions in a ResNet. The first key of the plan that fits a layer counts. None keeps a
            layer. ``"S1-B2"`` alone is ``{"S1-B2": "GW"}``.

    Returns:
        What became of each norm layer.

    Raises:
        ConversionError: a key fits no norm layer, all layers have their norms already, a layer contains an activation
            that its successor lacks, or the model cannot be changed.
        NormError, ConfigError: a norm is unknown or does not fit a layer, or positions are unknown.
    """
    _check_model(model)
    layers = {name: module for name, module in model.named_modules() if channels_of(module)}
    before = {name: describe(layer) for name, layer in layers.items()}
    new = _replacements(layers, _specs(model, layers, plan))
    old = {name: layers[name] for name in new}
    _check_containers(model, old)
    _check_shared(model, old)
    _warn_of_single_columns(old, new)
    _warn_of_statistics(old, new)
    _swap(model, old, new)
    rows = [ConvertedLayer(name, spec, describe(new[name]) if name in new else spec) for name, spec in before.items()]
    return ConversionReport(tuple(rows))


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        classes = type(module).__mro__
        where = f"convert_norms, {name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(f"{where}: is scripted. Fix: convert the model before scripting or tracing.")
        if any(".quantized" in cls.__module__ or ".intrinsic" in cls.__module__ for cls in classes):
            raise ConversionError(f"{where}: is quantized. Fix: convert the model before its quantization.")
        if getattr(module, "has_uninitialized_params", bool)():
            raise ConversionError(f"{where}: has no shape yet. Fix: run the model once before.")
        if any(cls.__name__ in _WRAPPERS for cls in classes):
            raise ConversionError(f"{where}: shares its parameters with other processes. Fix: convert the model first.")
    if channels_of(model):
        raise ConversionError("convert_norms: the model is a norm layer itself. Fix: build the other norm.")


def _specs(model: nn.Module, layers: Mapping[str, nn.Module], plan: Plan) -> dict[str, str | None]:
    """Return the norm name of each layer that the plan names."""
    if not isinstance(plan, (str, Mapping)):
        fix = 'give a position such as "S1-B2" or a dict such as {"*": "GW"}'
        raise ConversionError(f"convert_norms, plan ({plan!r}): not a plan. Fix: {fix}.")
    names = {id(layer): name for name, layer in layers.items()}
    aliases = {name: names[id(m)] for name, m in model.named_modules(remove_duplicate=False) if id(m) in names}
    found: dict[str, str | None] = {}
    for key, spec in ({plan: "GW"} if isinstance(plan, str) else plan).items():
        if isinstance(key, type):
            fitting = [name for name, layer in layers.items() if isinstance(layer, key)]
        elif not isinstance(key, str):
            raise ConversionError(f"convert_norms, plan ({key!r}): not a key. Fix: give a string or a layer class.")
        elif key in POSITIONS:
            fitting = norms_at(key, layers, where="convert_norms")
        else:
            fitting = [aliases[name] for name in fnmatch.filter(aliases, key)]
        if not fitting:
            others = [
                f"{name} ({type(module).__name__!r})"
                for name, module in model.named_modules()
                if name and (isinstance(module, key) if isinstance(key, type) else fnmatch.fnmatch(name, key))
            ]
            why = f"none of {len(layers)} norm layers"
            pattern = f"a glob pattern of names such as {list(layers)[:3]}"
            fix = f"use a layer class, one of {list(POSITIONS[1:])} or {pattern}"
            if others:
                why = f"{summarize_names(others, 2)}, no known norm layer"
                fix = "replace a norm of your own by hand, by model.set_submodule(NAME, GroupWhitening2d(CHANNELS))"
            elif plan == key and key.partition(":")[0] in norm_options():
                fix = f'give this norm to layers, e.g. {{"*": {key!r}}} to all'
            raise ConversionError(f"convert_norms, plan ({key!r}): fits {why}. Fix: {fix}.")
        if all(name in found for name in fitting):
            raise ConversionError(
                f"convert_norms, plan ({key!r}): earlier keys fit all of its layers. Fix: put it before them."
            )
        for name in fitting:
            found.setdefault(name, spec)
    return found


def _replacements(layers: Mapping[str, nn.Module], specs: Mapping[str, str | None]) -> dict[str, nn.Module]:
    """Build the new layers; those that equal the old ones are left out."""
    wanted = {name: spec for name, spec in specs.items() if spec is not None}
    if last := [name for name in wanted if has_channels_last(layers[name])]:
        patterns = dict.fromkeys(re.sub(r"\d+\.", "*.", name) for name in last)
        raise ConversionError(
            f"convert_norms, {last[0]} ({type(layers[last[0]]).__name__!r}): its channels are the last dimension; such "
            f"layers: {len(last)}, named {summarize_names(patterns)}. Fix: keep them all, by None at the start of the "
            f'plan, e.g. {{"{next(iter(patterns))}": None, ...}}.'
        )
    counts: dict[str, dict[str, int]] = {}
    for name, spec in wanted.items():
        counts.setdefault(spec, {})[name] = channels_of(layers[name])
    for spec, channels in counts.items():
        resolve_norm(spec, where=f"convert_norms, {next(iter(channels))}", channels=channels.values())
    built = {name: replacement(name, layers[name], spec) for name, spec in wanted.items()}
    new = {name: layer for name, layer in built.items() if describe(layer) != describe(layers[name])}
    if built and not new:
        name = next(iter(built))
        raise ConversionError(
            f"convert_norms, {name} ({describe(layers[name])!r}): has this norm already, as all layers of the plan. "
            "Fix: give another norm."
        )
    return new


def _swap(model: nn.Module, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    replacements = {id(old[name]): layer for name, layer in new.items()}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in replacements:
                module._modules[name] = replacements[id(child)]


def _check_containers(model: nn.Module, old: Mapping[str, nn.Module]) -> None:
    """Refuse layers that a module also keeps in a plain list or dict, where they could not be replaced."""
    names = {id(layer): name for name, layer in old.items()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules" or not isinstance(value, (list, tuple, set, dict)):
                continue
            for kept in _contents(value):
                if id(kept) in names:
                    where = f"{path}.{attribute}" if path else attribute
                    raise ConversionError(
                        f"convert_norms, {names[id(kept)]}: {where} is a plain {type(value).__name__} that holds it "
                        "too, and would keep the old layer. Fix: use torch.nn.ModuleList or torch.nn.ModuleDict."
                    )


def _contents(container: Any, outer: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what is in plain lists and dicts, also nested ones, which may contain themselves."""
    for value in container.values() if isinstance(container, dict) else container:
        if not isinstance(value, (list, tuple, set, dict)):
            yield value
        elif id(value) not in outer:
            yield from _contents(value, (*outer, id(value)))


def _check_shared(model: nn.Module, old: Mapping[str, nn.Module]) -> None:
    """Refuse layers that share a parameter with another module, as they would share it no longer."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(path)
    for paths in owners.values():
        shared = [path for path in paths if path in old]
        if shared and len(paths) > 1:
            other = next(path for path in paths if path != shared[0])
            raise ConversionError(
                f"convert_norms, {shared[0]}: shares a parameter with {other}, and the new layer would have its own. "
                "Fix: keep both, by None in the plan, or give each its own parameter."
            )


def _warn_of_single_columns(old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
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
            "(N, C), a group has one value, and the output is the shift alone. Fix: keep them, by None in the plan, or "
            "use fewer groups, e.g. 'GW:groups=8'.",
            stacklevel=3,
        )


def _loses_statistics(old: nn.Module, new: nn.Module) -> bool:
    mean = getattr(old, "running_mean", None)
    if isinstance(mean, Tensor):
        return not mean.is_meta and bool(mean.any()) and not keeps_statistics(old, new)
    return uses_batch_statistics_alone(old) and getattr(new, "running_mean", None) is not None


def _warn_of_statistics(old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    trained = [name for name, layer in old.items() if _loses_statistics(layer, new[name])]
    if trained:
        warnings.warn(
            f"convert_norms: {len(trained)} layers ({trained[0]}, ...) lose their running statistics; expect low "
            "accuracy until you fine-tune.",
            stacklevel=3,
        )
