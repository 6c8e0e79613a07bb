"""The norm layer that takes the place of another."""

import torch
from torch import Tensor, nn

from ..errors import ConversionError
from ..layers import BatchRenorm2d, BatchWhitening2d, GroupWhitening2d
from ..layers.mixin_swap import ClassChange, change_class
from .installed import get_norm
from .names import find_norm_spec, resolve_norm
from .norm_listing import channels_of

_AFFINE = ("weight", "bias")
_STATISTICS = ("running_mean", "running_var", "running_matrix", "running_covariance")
#: whose matrix for a diagonal covariance is its inverse square root
_EXACT_SOLVERS = ("zca", "cholesky", "standardize")
#: packages whose norm layers compute the norm, and an activation only in ``act``
_PACKAGES = ("torch", "torchvision", "timm", "detectron2", "gw_detectron")
#: layers that work without scale and shift
_OPTIONAL_AFFINE = (nn.BatchNorm2d, nn.GroupNorm, GroupWhitening2d, BatchWhitening2d)
#: layers for inputs of any number of dimensions
_ANY_RANK = (nn.Identity, nn.GroupNorm, nn.SyncBatchNorm, GroupWhitening2d, BatchWhitening2d)


def describe(layer: nn.Module) -> str:
    """Return the norm name of a layer, or the name of its class."""
    return find_norm_spec(layer) or type(layer).__name__


def replacement(name: str, old: nn.Module, spec: str) -> nn.Module:
    """Build the layer of a norm name with the parameters and the state of another layer.

    Args:
        name: the old layer's, for messages.
        old: a norm layer whose channels are the second dimension; it is not changed.
        spec: the norm name.

    Raises:
        ConversionError: the norm cannot compute what the old layer does, or its input has another rank.
        NormError: the norm is unknown or does not fit.
    """
    where, channels = f"convert_norms, {name}", channels_of(old)
    more = [name for name, value in old._parameters.items() if name not in _AFFINE and value is not None]
    activation = getattr(old, "act", None)
    if more and not isinstance(activation, nn.Module):
        raise ConversionError(
            f"{where} ({type(old).__name__!r}): contains an activation with parameters ({', '.join(more)}), which "
            f"{spec} does not have. Fix: keep it, by None in the plan."
        )
    own = isinstance(old, (nn.modules.batchnorm._NormBase, *_OPTIONAL_AFFINE)) and _package(old) not in _PACKAGES
    own = own or "forward" in vars(old) or type(old).__call__ is not nn.Module.__call__
    if own and not isinstance(activation, nn.Module):
        raise ConversionError(
            f"{where} ({type(old).__name__!r}): has a forward of its own, which {spec} would not compute, such as an "
            "activation. Fix: keep it, by None in the plan, or put a plain norm layer and that operation in its place."
        )
    norm = resolve_norm(_with_settings(spec, old), where=where, channels=[channels])
    some = next((tensor for tensor in (*old.parameters(), *old.buffers()) if tensor.is_floating_point()), None)
    with torch.device("cpu" if some is None else some.device):
        new = get_norm(norm, channels)
    new = nn.Identity() if new is None else new
    if any(cls.__name__.endswith(("1d", "3d")) for cls in type(old).__mro__) and not isinstance(new, _ANY_RANK):
        raise ConversionError(
            f"{where} ({type(old).__name__!r}): {spec} normalizes (N, C, H, W) only. Fix: use GW, GN or SyncBN."
        )
    if some is not None:
        new.to(some.dtype)
    _copy_state(old, new)
    if uses_batch_statistics_alone(old):
        _use_batch_statistics(new, where, type(old).__name__)
    both = hasattr(old, "running_mean") and hasattr(new, "running_mean")
    if both and (isinstance(norm, str) or isinstance(new, BatchRenorm2d)):
        # what their names cannot state
        for setting in ("eps", "momentum") if isinstance(norm, str) else ("eps",):
            if hasattr(old, setting) and hasattr(new, setting):
                setattr(new, setting, getattr(old, setting))
    new.train(old.training)
    if isinstance(activation, nn.Module):
        change_class(new, Activated)
        new.drop, new.act = getattr(old, "drop", nn.Identity()), activation
    return new


def has_channels_last(layer: nn.Module) -> bool:
    """Tell whether a norm layer takes its channels as the last dimension."""
    return hasattr(layer, "normalized_shape") and "2d" not in type(layer).__name__ and _package(layer) != "detectron2"


def _package(layer: nn.Module) -> str:
    """Return the package whose ``forward`` a layer has."""
    return next(cls for cls in type(layer).__mro__ if "forward" in vars(cls)).__module__.partition(".")[0]


def _with_settings(spec: str, old: nn.Module) -> str:
    """Add eps and momentum of a BN layer to the name of BN with a rotation, unless it states them."""
    name, _, options = spec.partition(":") if isinstance(spec, str) else ("", "", "")
    if name != "BN" or not options or not hasattr(old, "running_mean"):
        return spec
    settings = {key: getattr(old, key, None) for key in ("eps", "momentum") if f"{key}=" not in options}
    return ",".join([spec, *(f"{key}={value}" for key, value in settings.items() if value is not None)])


def _copy_state(old: nn.Module, new: nn.Module) -> None:
    """Copy scale, shift and running statistics, and which parameters are frozen."""
    optional = isinstance(new, _OPTIONAL_AFFINE) and not isinstance(new, BatchRenorm2d)
    with torch.no_grad():
        for name in (*_AFFINE, *_STATISTICS, "num_batches_tracked"):
            before, after = getattr(old, name, None), getattr(new, name, None)
            if before is not None and after is not None and before.numel() == after.numel():
                after.copy_(before.reshape(after.shape))
            if before is None and isinstance(after, nn.Parameter):
                after.requires_grad_(False)
                if optional:
                    for attribute, value in ((name, None), ("affine", False)):
                        setattr(new, attribute, value)
            if isinstance(before, nn.Parameter) and isinstance(after, nn.Parameter):
                after.requires_grad_(before.requires_grad)
    if isinstance(new, BatchWhitening2d) and isinstance(variance := getattr(old, "running_var", None), Tensor):
        new.start_from_variance(variance, getattr(old, "eps", 0.0))
    weight = old._parameters.get("weight")
    for name, parameter in new.named_parameters():
        if name not in _AFFINE and weight is not None:
            parameter.requires_grad_(weight.requires_grad)


def _use_batch_statistics(new: nn.Module, where: str, old: str) -> None:
    """Let a layer of BN normalize by the batch also in evaluation, as ``track_running_stats=False`` does.

    Raises:
        ConversionError: the layer would keep mean 0 and variance 1.
    """
    if describe(new).startswith("Frozen"):
        raise ConversionError(
            f"{where} ({old!r}): has no running statistics (track_running_stats=False), which {describe(new)} needs. "
            "Fix: use BN or GW."
        )
    if isinstance(new, nn.modules.batchnorm._NormBase) and type(new).__module__.startswith("torch."):
        new.track_running_stats = False
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(new, name, None)


def uses_batch_statistics_alone(layer: nn.Module) -> bool:
    """Tell whether a layer is BN without running statistics."""
    if not isinstance(layer, nn.modules.batchnorm._NormBase) or layer.running_mean is not None:
        return False
    return not isinstance(layer, nn.modules.instancenorm._InstanceNorm)  # whose statistics are of a sample


def keeps_statistics(old: nn.Module, new: nn.Module) -> bool:
    """Tell whether the running statistics of a layer are those of the layer that it replaces."""
    if isinstance(new, BatchWhitening2d) and getattr(old, "running_var", None) is not None:
        return new.running == "matrix" or new.solver.name in _EXACT_SOLVERS
    sizes = {
        name: [getattr(layer, name).numel() for layer in (old, new) if getattr(layer, name, None) is not None]
        for name in _STATISTICS
        if getattr(new, name, None) is not None
    }
    return bool(sizes) and all(len(found) == 2 and found[0] == found[1] for found in sizes.values())


class Activated(ClassChange):
    """Mixin for a norm layer that contains its activation, as timm's ``BatchNormAct2d``."""

    fuses_relu = False
    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))
