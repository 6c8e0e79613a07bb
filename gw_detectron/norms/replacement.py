"""The norm layer that takes the place of another."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import prune

from ..errors import NormError
from ..layers import BatchRenorm2d, BatchWhitening2d, GroupWhitening2d
from ..layers.mixed_norms import MixedNorm, check_variance
from .listing import channels_of, is_norm, scale_of
from .names import Norm, build_norm, norm_spec

_AFFINE = ("weight", "bias")
_STATISTICS = ("running_mean", "running_var", "running_matrix", "running_covariance")
#: whose matrix for a diagonal covariance is its inverse square root
_EXACT_SOLVERS = ("zca", "cholesky", "standardize")
#: packages whose norm layers compute the norm, and an activation only in ``act``
_PACKAGES = ("torch", "torchvision", "timm", "detectron2", "gw_detectron")
#: layers whose input is not (N, C, H, W)
_OTHER_SHAPES = (nn.BatchNorm1d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm3d)
#: layers that work without scale and shift
_OPTIONAL_AFFINE = (nn.BatchNorm2d, nn.GroupNorm, GroupWhitening2d, BatchWhitening2d)


def describe(layer: nn.Module) -> str:
    """Return the norm name of a layer, or the name of its class."""
    return norm_spec(layer) or type(layer).__name__


def replacement(name: str, old: nn.Module, spec: Norm) -> nn.Module:
    """Build the layer of a norm name with the parameters and the state of a layer, which is not changed.

    A norm that does not fit, or cannot compute what the old layer does, is a NormError; messages have the layer's
    ``name``.
    """
    where = f"convert_norms, {name} ({type(old).__name__!r})"
    activation = _activation(old, where)
    new = _new_layer(name, old, spec)
    if isinstance(old, _OTHER_SHAPES) and _needs_images(new):
        if spec == "BN" and isinstance(old, _BatchNorm):
            return old
        raise NormError(
            f"{where}: its input is not (N, C, H, W), which {spec} needs. Fix: use SyncBN, BW or GW, or keep it by "
            "None in the plan."
        )
    _check_statistics(old, new, spec, where)

    _copy_tensors(old, new)
    _copy_affine(old, new)
    _copy_settings(old, new, spec)
    if isinstance(new, MixedNorm):
        _check_variance(new, where)
    variance = _tensor(old, "running_var")
    if isinstance(new, BatchWhitening2d) and variance is not None:
        new.start_from_variance(variance, getattr(old, "eps", 0.0))
    new.train(old.training)

    if activation is not None:
        new.drop = getattr(old, "drop", nn.Identity())
        new.act = activation
        new.fuses_relu = False
        new.register_forward_hook(_activate)
    return new


def _new_layer(name: str, old: nn.Module, spec: Norm) -> Any:
    """Build a layer with the channels, the device and the dtype of another."""
    tensors = (*old.parameters(), *old.buffers(), torch.empty(0, device="cpu"))
    example = next(tensor for tensor in tensors if tensor.is_floating_point())
    with torch.device(example.device):
        new = build_norm(spec, channels_of(old), where=f"convert_norms, {name}")
    return nn.Identity() if new is None else new.to(example.dtype)


def _needs_images(layer: nn.Module) -> bool:
    """Return whether a layer takes inputs (N, C, H, W) only."""
    return isinstance(layer, nn.BatchNorm2d) or describe(layer) in ("FrozenBN", "LN")


def _tensor(layer: nn.Module, name: str) -> Tensor | None:
    return getattr(layer, name, None)


def _activation(old: nn.Module, where: str) -> nn.Module | None:
    """Return the activation that a layer contains as timm's ``BatchNormAct2d`` does; refuse any other one."""
    activation = getattr(old, "act", None)
    if isinstance(activation, nn.Module):
        return activation

    if prune.is_pruned(old):
        raise NormError(
            f"{where}: is pruned. Fix: keep it, by None in the plan, or end the pruning first, by "
            "torch.nn.utils.prune.remove."
        )
    others = set(dict(old.named_parameters(recurse=False))) - {*_AFFINE}
    if others:
        raise NormError(
            f"{where}: contains an activation with parameters ({', '.join(others)}). Fix: keep it, by None in the plan."
        )
    if _has_own_forward(old):
        raise NormError(
            f"{where}: has a forward of its own, which may contain an activation. Fix: keep it, by None in the plan, "
            "or put a plain norm layer and that operation in its place."
        )
    return None


def _has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer may compute more than the norm that its class or base class computes."""
    if "forward" in vars(layer) or type(layer).__call__ is not nn.Module.__call__:
        return True
    if isinstance(layer, (_NormBase, *_OPTIONAL_AFFINE)):
        return _package(layer) not in _PACKAGES
    return False


def _activate(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Apply the activation that a layer has taken over, as a forward hook."""
    return layer.act(layer.drop(output))


def has_channels_last(layer: nn.Module) -> bool:
    """Return whether a norm layer takes its channels as the last dimension: where it does not run on an image."""
    if isinstance(layer, _NormBase) or norm_spec(layer):
        return False

    channels = channels_of(layer)
    width = 3 if channels == 2 else 2
    if _runs(layer, (1, channels, 1, width)):
        return False
    return isinstance(layer, nn.LayerNorm) or _runs(layer, (1, width, 1, channels))


def _runs(layer: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a layer takes an input of this shape; its state stays."""
    scale = scale_of(layer)
    assert scale is not None, "a norm of an unknown class has one"
    try:
        with torch.no_grad():
            copy.deepcopy(layer).eval()(scale.new_zeros(shape))
    except Exception:  # whatever a layer of an unknown class raises
        return False
    return True


def _package(layer: nn.Module) -> str:
    """Return the package whose ``forward`` a layer has."""
    module = type(layer).forward.__module__
    return module.partition(".")[0]


def _copy_tensors(old: nn.Module, new: nn.Module) -> None:
    """Copy scale, shift and running statistics."""
    for name in (*_AFFINE, *_STATISTICS, "num_batches_tracked"):
        if _fits(old, new, name):
            value = getattr(old, name)
            target = getattr(new, name)
            with torch.no_grad():
                target.copy_(value.reshape(target.shape))


def _fits(old: nn.Module, new: nn.Module, name: str) -> bool:
    """Return whether two layers have a tensor of this name and size."""
    before = _tensor(old, name)
    after = _tensor(new, name)
    if before is None or after is None:
        return False
    return before.numel() == after.numel()


def _copy_affine(old: nn.Module, new: Any) -> None:
    """Freeze parameters that the old layer has frozen or lacks; remove the latter where a layer may lack them."""
    optional = isinstance(new, _OPTIONAL_AFFINE) and not isinstance(new, BatchRenorm2d)
    for name, parameter in list(new.named_parameters()):
        # a rotation is frozen with the scale
        source = name if name in _AFFINE else "weight"
        before = old._parameters.get(source)
        if before is not None:
            parameter.requires_grad_(parameter.requires_grad and before.requires_grad)
        elif name in _AFFINE and _tensor(old, name) is None:
            parameter.requires_grad_(False)
            if optional:
                setattr(new, name, None)
                new.affine = False


def _copy_settings(old: nn.Module, new: nn.Module, spec: Norm) -> None:
    """Copy eps and momentum from BN to a layer with running statistics whose name does not state them."""
    if not hasattr(old, "running_mean") or not hasattr(new, "running_mean"):
        return
    is_mixed = isinstance(new, MixedNorm)
    if not (is_mixed or isinstance(spec, (str, type))):  # a function may state eps
        return
    # eps of the mixed norms belongs to BN's variance, also where their full name has it
    stated = str(spec) if is_mixed else describe(new)
    for setting in vars(old).keys() & vars(new).keys() & {"eps", "momentum"}:
        if f"{setting}=" not in stated:
            setattr(new, setting, getattr(old, setting))


def _check_statistics(old: nn.Module, new: nn.Module, spec: Norm, where: str) -> None:
    """Refuse a norm with running statistics where the old layer lacks those that it should start from."""
    if _tensor(new, "running_mean") is None:
        return
    if _tensor(old, "running_mean") is not None:
        return

    # BN with track_running_stats=False, and Detectron2's CycleBatchNormList
    had_statistics = isinstance(old, _BatchNorm) or any(map(is_norm, old.children()))
    is_fixed = isinstance(new, MixedNorm) or describe(new).startswith("Frozen")
    if had_statistics or is_fixed:
        raise NormError(
            f"{where}: has no running statistics of its own, which {spec} needs. Fix: use GW or GN, or keep it by None "
            "in the plan."
        )


def _check_variance(new: MixedNorm, where: str) -> None:
    try:
        check_variance(new.running_var, new.eps, where)
    except ValueError as error:
        raise NormError(f"{error} Fix: give other weights.") from None


def loses_statistics(old: nn.Module, new: nn.Module) -> bool:
    """Return whether trained running statistics of a layer do not suit the layer that replaces it."""
    mean = _tensor(old, "running_mean")
    if mean is None or mean.is_meta or not mean.any():
        return False
    if isinstance(new, BatchWhitening2d) and _tensor(old, "running_var") is not None:
        return new.running != "matrix" and new.solver.name not in _EXACT_SOLVERS

    wanted = [name for name in _STATISTICS if _tensor(new, name) is not None]
    kept = [name for name in wanted if _fits(old, new, name)]
    return not kept or kept != wanted
