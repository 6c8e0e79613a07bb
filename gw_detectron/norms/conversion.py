"""Replace the norm layers of a built model, in place."""

import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..layers.class_change import ClassChange, change_class
from .calibrate import match_moments, moments, outputs
from .installed import get_norm
from .names import find_norm_spec, resolve_norm
from .positions import POSITIONS, norms_at

Plan = str | Mapping[str | type[nn.Module], str]


class ConversionError(UserError, ValueError):
    """A model cannot be converted. It is unchanged."""


class Conversion(NamedTuple):
    """What became of a norm layer."""

    layer: str
    before: str
    after: str  # equal to ``before`` if it was kept


class ConversionReport(NamedTuple):
    """What became of every norm layer of a model.

    Args:
        layers: in module order; a layer that is used under several names is listed under its first.
        unlike: relative difference between the last converted layer's outputs and the old layer's, before and after
            calibration; None without.
    """

    layers: tuple[Conversion, ...]
    unlike: tuple[float, float] | None = None

    def __str__(self) -> str:
        changed = [row for row in self.layers if row.after != row.before]
        lines = [f"{row.layer}: {row.before} -> {row.after}" for row in changed]
        lines.append(f"{len(changed)} of {len(self.layers)} norm layers converted")
        if self.unlike:
            before, after = self.unlike
            lines.append(f"calibration: the outputs of the last one differ by {after:.2f} instead of {before:.2f}")
        return "\n".join(lines)


def convert_norms(model: nn.Module, plan: Plan, *, calibrate: Iterable[Any] | None = None) -> ConversionReport:
    """Replace norm layers of a model by the norms of a plan, in place.

    Scale and shift, frozen state, device, dtype and mode are kept, and running statistics where both layers have them.
    A layer that contains its activation (timm's ``BatchNormAct2d``) keeps it.

    Weights that were trained with BN do not fit a norm of each sample: the model needs training afterwards.

    Args:
        model: any model that is not scripted, quantized or wrapped for several processes.
        plan: norm names (see :mod:`gw_detectron.norms.names`) by glob patterns of module names, by layer classes, or by
            one of the paper's positions in a ResNet. The first key that fits a layer counts. ``"S1-B2"`` alone is
            ``{"S1-B2": "GW"}``.
        calibrate: inputs of the model. Scale and shift of each new layer are set so that mean and variance of its
            output on them are the old layer's.

    Returns:
        What became of each norm layer.

    Raises:
        ConversionError: a key fits no norm layer, a layer has this norm already, or the model cannot be changed.
        NormError, ConfigError: a norm is unknown or does not fit a layer, or positions are unknown.
    """
    _check_model(model)
    layers = {name: module for name, module in model.named_modules() if _channels(module)}
    before = {name: _describe(layer) for name, layer in layers.items()}
    new = {name: _replacement(name, layers[name], spec) for name, spec in _specs(layers, plan).items()}
    old = {name: layers[name] for name in new}
    unlike = None
    if calibrate is None:
        _swap(model, old, new)
        _warn_of_statistics(old, new)
    else:
        unlike = _swap_calibrated(model, old, new, list(calibrate))
    rows = [Conversion(name, spec, _describe(new[name]) if name in new else spec) for name, spec in before.items()]
    return ConversionReport(tuple(rows), unlike)


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        classes = type(module).__mro__
        where = f"convert_norms, {name or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConversionError(f"{where}: is scripted. Fix: convert the model before scripting or tracing.")
        if any(".quantized" in cls.__module__ or ".intrinsic" in cls.__module__ for cls in classes):
            raise ConversionError(f"{where}: is quantized. Fix: convert the model before its quantization.")
        if any(cls.__name__ in _WRAPPERS for cls in classes):
            raise ConversionError(f"{where}: shares its parameters with other processes. Fix: convert the model first.")
    if _channels(model):
        raise ConversionError("convert_norms: the model is a norm layer itself. Fix: build the other norm.")


def _channels(layer: nn.Module) -> int:
    """Return C of a norm layer, 0 of any other module."""
    if "Norm" not in type(layer).__name__ and find_norm_spec(layer) is None:
        return 0
    for name in ("num_features", "num_channels", "normalized_shape"):
        value = getattr(layer, name, None)
        if isinstance(value, (tuple, torch.Size)) and len(value) == 1:
            value = value[0]
        if isinstance(value, int):
            return value
    return 0


def _describe(layer: nn.Module) -> str:
    return find_norm_spec(layer) or type(layer).__name__


def _specs(layers: Mapping[str, nn.Module], plan: Plan) -> dict[str, str]:
    """Return the norm name of each layer to convert."""
    found: dict[str, str] = {}
    for key, spec in ({plan: "GW"} if isinstance(plan, str) else plan).items():
        if isinstance(key, type):
            names = [name for name, layer in layers.items() if isinstance(layer, key)]
        elif key in POSITIONS:
            names = norms_at(key, layers, where="convert_norms")
        else:
            names = fnmatch.filter(layers, key)
        if not names:
            raise ConversionError(
                f"convert_norms, plan ({key!r}): fits none of {len(layers)} norm layers. Fix: use a layer class, one "
                f"of {list(POSITIONS[1:])} or a glob pattern of names such as {list(layers)[:3]}."
            )
        for name in names:
            found.setdefault(name, spec)
    return found


def _replacement(name: str, old: nn.Module, spec: str) -> nn.Module:
    """Build the new layer with the old one's parameters."""
    where, channels = f"convert_norms, {name}", _channels(old)
    if type(old) is nn.LayerNorm:
        fix = "Fix: leave it out of the plan."
        raise ConversionError(f"{where} ('LayerNorm'): its channels are the last dimension. {fix}")
    new = get_norm(resolve_norm(spec, where=where, channels=[channels]), channels)
    if new is None:
        new = nn.Identity()
    if _describe(new) == find_norm_spec(old):
        raise ConversionError(f"{where} ({_describe(old)!r}): has this norm already. Fix: leave it out of the plan.")
    weight = getattr(old, "weight", None)
    for parameter in ("weight", "bias"):
        if getattr(old, parameter, None) is None and isinstance(getattr(new, parameter, None), nn.Parameter):
            setattr(new, parameter, None)
    with torch.no_grad():
        for tensor in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            before, after = getattr(old, tensor, None), getattr(new, tensor, None)
            if before is not None and after is not None:
                after.copy_(before.reshape(-1) if tensor in ("weight", "bias") else before)
    some = next((t for t in (*old.parameters(), *old.buffers()) if t.is_floating_point()), None)
    if some is not None:
        new.to(some.device, some.dtype)
    if weight is not None and not weight.requires_grad:
        new.requires_grad_(False)
    new.train(old.training)
    return _with_activation(new, old)


class Activated(ClassChange):
    """Mixin for a norm layer that contains its activation, as timm's ``BatchNormAct2d``."""

    fuses_relu = False
    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def _with_activation(new: nn.Module, old: nn.Module) -> nn.Module:
    activation = getattr(old, "act", None)
    if isinstance(activation, nn.Module):
        change_class(new, Activated)
        new.drop, new.act = getattr(old, "drop", nn.Identity()), activation
    return new


def _swap(model: nn.Module, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    replacements = {id(old[name]): layer for name, layer in new.items()}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in replacements:
                module._modules[name] = replacements[id(child)]


def _swap_calibrated(
    model: nn.Module, old: Mapping[str, nn.Module], new: Mapping[str, nn.Module], inputs: Sequence[Any]
) -> tuple[float, float]:
    """Replace layers and set their scale and shift; the model is unchanged after an error."""
    if not inputs:
        raise ConversionError("calibrate ([]): no inputs. Fix: give some inputs of the model.")
    wanted = moments(model, inputs, old)
    if not wanted:
        raise ConversionError("calibrate: the model calls none of the layers. Fix: give other inputs.")
    last = [*wanted][-1]
    expected = outputs(model, inputs, old[last])
    _swap(model, old, new)
    try:
        before = _difference(outputs(model, inputs, new[last]), expected)
        match_moments(model, inputs, new, wanted)
        return before, _difference(outputs(model, inputs, new[last]), expected)
    except BaseException:
        _swap(model, new, old)
        raise


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the relative difference in the Frobenius norm; infinity if the calls differ."""
    if [value.shape for value in found] != [value.shape for value in expected]:
        return float("inf")
    squares = sum(float((a - b).double().square().sum()) for a, b in zip(found, expected, strict=True))
    return (squares / sum(float(b.double().square().sum()) for b in expected)) ** 0.5


def _warn_of_statistics(old: Mapping[str, nn.Module], new: Mapping[str, nn.Module]) -> None:
    trained = [
        name
        for name, layer in old.items()
        if isinstance(mean := getattr(layer, "running_mean", None), Tensor)
        and bool(mean.any())
        and getattr(new[name], "running_mean", None) is None
    ]
    if trained:
        warnings.warn(
            f"convert_norms: {len(trained)} layers ({trained[0]}, ...) were trained with batch statistics, which the "
            "new ones do not use: the model has lost its accuracy until it is trained again. Fix: train it; "
            "calibrate=images gives a better start.",
            stacklevel=3,
        )
