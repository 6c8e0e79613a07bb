"""The norm layer that takes the place of another."""

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..layers import BatchRenorm2d, BatchWhitening2d, GroupWhitening2d
from ..layers.class_change import ClassChange, change_class
from .installed import get_norm
from .names import find_norm_spec, resolve_norm

_AFFINE = ("weight", "bias")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
#: layers that work without scale and shift
_OPTIONAL_AFFINE = (nn.BatchNorm2d, nn.GroupNorm, GroupWhitening2d, BatchWhitening2d)
#: layers for inputs of any number of dimensions
_ANY_RANK = (nn.Identity, nn.GroupNorm, nn.SyncBatchNorm, GroupWhitening2d, BatchWhitening2d)


class ConversionError(UserError, ValueError):
    """A model cannot be converted. It is unchanged."""


def channels_of(layer: nn.Module) -> int:
    """Return C of a norm layer, 0 of any other module.

    A layer of an unknown class is a norm if the name of its class contains "Norm" and it has a scale of its own.
    """
    known = isinstance(layer, nn.modules.batchnorm._NormBase) or find_norm_spec(layer) is not None
    weight = {**layer._parameters, **layer._buffers}.get("weight")
    if not known and not ("Norm" in type(layer).__name__ and weight is not None and weight.dim() == 1):
        return 0
    count = getattr(layer, "num_features", getattr(layer, "num_channels", None))
    return count if isinstance(count, int) else 0 if weight is None else len(weight)


def describe(layer: nn.Module) -> str:
    """Return the norm name of a layer, or the name of its class."""
    return find_norm_spec(layer) or type(layer).__name__


def replacement(name: str, old: nn.Module, spec: str) -> nn.Module:
    """Build the layer of a norm name with the parameters and the state of another layer.

    Args:
        name: the old layer's, for messages.
        old: a norm layer; it is not changed.
        spec: the norm name.

    Raises:
        ConversionError: the channels of the old layer are not the second dimension, or its input has another rank.
        NormError: the norm is unknown or does not fit.
    """
    where, channels = f"convert_norms, {name}", channels_of(old)
    if hasattr(old, "normalized_shape") and "2d" not in type(old).__name__:
        raise ConversionError(
            f"{where} ({type(old).__name__!r}): its channels are the last dimension. Fix: keep it, by None in the plan."
        )
    norm = resolve_norm(spec, where=where, channels=[channels])
    some = next((tensor for tensor in (*old.parameters(), *old.buffers()) if tensor.is_floating_point()), None)
    with torch.device("cpu" if some is None else some.device):
        new = get_norm(norm, channels)
    new = nn.Identity() if new is None else new
    if type(old).__name__.endswith(("1d", "3d")) and not isinstance(new, _ANY_RANK):
        raise ConversionError(
            f"{where} ({type(old).__name__!r}): {spec} normalizes (N, C, H, W) only. Fix: use GW, GN or SyncBN."
        )
    if some is not None:
        new.to(some.dtype)
    _copy_state(old, new)
    if isinstance(norm, str) and hasattr(old, "running_mean"):  # Detectron2's, which have no options
        for setting in ("eps", "momentum"):
            if hasattr(old, setting) and hasattr(new, setting):
                setattr(new, setting, getattr(old, setting))
    new.train(old.training)
    if isinstance(activation := getattr(old, "act", None), nn.Module):
        change_class(new, Activated)
        new.drop, new.act = getattr(old, "drop", nn.Identity()), activation
    return new


def _copy_state(old: nn.Module, new: nn.Module) -> None:
    """Copy scale, shift and running statistics, and which parameters are frozen."""
    optional = isinstance(new, _OPTIONAL_AFFINE) and not isinstance(new, BatchRenorm2d)
    with torch.no_grad():
        for name in (*_AFFINE, *_STATISTICS):
            before, after = getattr(old, name, None), getattr(new, name, None)
            if before is not None and after is not None:
                after.copy_(before.reshape(after.shape))
            if before is None and isinstance(after, nn.Parameter):
                after.requires_grad_(False)
                if optional:
                    setattr(new, name, None)
            if isinstance(before, nn.Parameter) and isinstance(after, nn.Parameter):
                after.requires_grad_(before.requires_grad)
    weight = old._parameters.get("weight")
    for name, parameter in new.named_parameters():
        if name not in _AFFINE and weight is not None:
            parameter.requires_grad_(weight.requires_grad)


class Activated(ClassChange):
    """Mixin for a norm layer that contains its activation, as timm's ``BatchNormAct2d``."""

    fuses_relu = False
    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))
