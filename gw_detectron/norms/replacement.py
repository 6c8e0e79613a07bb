"""The norm layer that takes the place of another."""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NormError
from ..layers import BatchRenorm2d, BatchWhitening2d, GroupWhitening2d
from .listing import channels_of
from .names import Norm, build_norm, norm_spec

_AFFINE = ("weight", "bias")
_STATISTICS = ("running_mean", "running_var", "running_matrix", "running_covariance")
#: names that state no eps and momentum
_BN = ("BN", "SyncBN", "FrozenBN", "naiveSyncBN", "naiveSyncBN_N")
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
    some = next(
        (
            tensor
            for tensor in (*old.parameters(), *old.buffers())
            if tensor.is_floating_point()
        ),
        None,
    )
    with torch.device("cpu" if some is None else some.device):
        new = (
            build_norm(spec, channels_of(old), where=f"convert_norms, {name}") or nn.Identity()
        )
    if some is not None:
        new.to(some.dtype)
    if isinstance(old, _OTHER_SHAPES) and (
        isinstance(new, nn.BatchNorm2d) or describe(new) in ("FrozenBN", "LN")
    ):
        if spec == "BN" and isinstance(old, nn.modules.batchnorm._BatchNorm):
            return old
        raise NormError(
            f"{where}: its input is not (N, C, H, W), which {spec} needs. Fix: use SyncBN, BW or GW, or keep it by "
            "None in the plan."
        )
    _check_statistics(old, new, spec, where)
    _copy_state(old, new)
    states_nothing = (
        isinstance(spec, (str, type)) and describe(new) in _BN
    )  # a function may state eps
    for setting in (
        ("eps",)
        if isinstance(new, BatchRenorm2d)
        else ("eps", "momentum")
        if states_nothing
        else ()
    ):
        if hasattr(old, "running_mean") and hasattr(old, setting) and hasattr(new, setting):
            setattr(new, setting, getattr(old, setting))
    new.train(old.training)
    if activation is not None:
        new.drop, new.act = getattr(old, "drop", nn.Identity()), activation
        new.register_forward_hook(_activate)
        setattr(new, "fuses_relu", False)  # noqa: B010, mypy takes attributes of modules for tensors
    return new


def _activation(old: nn.Module, where: str) -> nn.Module | None:
    """Return the activation that a layer contains as timm's ``BatchNormAct2d`` does; refuse any other one."""
    activation = getattr(old, "act", None)
    if isinstance(activation, nn.Module):
        return activation
    if more := [
        name
        for name, value in old._parameters.items()
        if name not in _AFFINE and value is not None
    ]:
        raise NormError(
            f"{where}: contains an activation with parameters ({', '.join(more)}). Fix: keep it, by None in the plan."
        )
    own = (
        isinstance(old, (nn.modules.batchnorm._NormBase, *_OPTIONAL_AFFINE))
        and _package(old) not in _PACKAGES
    )
    if own or "forward" in vars(old) or type(old).__call__ is not nn.Module.__call__:
        raise NormError(
            f"{where}: has a forward of its own, which may contain an activation. Fix: keep it, by None in the plan, "
            "or put a plain norm layer and that operation in its place."
        )
    return None


def _activate(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Apply the activation that a layer has taken over, as a forward hook."""
    return layer.act(layer.drop(output))


def has_channels_last(layer: nn.Module) -> bool:
    """Return whether a norm layer takes its channels as the last dimension."""
    return (
        hasattr(layer, "normalized_shape")
        and "2d" not in type(layer).__name__
        and _package(layer) != "detectron2"
    )


def _package(layer: nn.Module) -> str:
    """Return the package whose ``forward`` a layer has."""
    return next(
        cls for cls in type(layer).__mro__ if "forward" in vars(cls)
    ).__module__.partition(".")[0]


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
    if isinstance(new, BatchWhitening2d) and isinstance(
        variance := getattr(old, "running_var", None), Tensor
    ):
        new.start_from_variance(variance, getattr(old, "eps", 0.0))
    weight = old._parameters.get("weight")
    for name, parameter in new.named_parameters():
        if name not in _AFFINE and weight is not None:
            parameter.requires_grad_(parameter.requires_grad and weight.requires_grad)


def _check_statistics(old: nn.Module, new: nn.Module, spec: Norm, where: str) -> None:
    """Refuse a norm with running statistics where the old layer lacks those that it should start from."""
    if (
        getattr(new, "running_mean", None) is None
        or getattr(old, "running_mean", None) is not None
    ):
        return
    is_batch_norm = isinstance(
        old, nn.modules.batchnorm._BatchNorm
    )  # with track_running_stats=False
    contains_norms = any(
        channels_of(module) for module in old.modules() if module is not old
    )  # CycleBatchNormList
    if is_batch_norm or contains_norms or describe(new).startswith("Frozen"):
        raise NormError(
            f"{where}: has no running statistics of its own, which {spec} needs. Fix: use GW or GN, or keep it by None "
            "in the plan."
        )


def loses_statistics(old: nn.Module, new: nn.Module) -> bool:
    """Return whether trained running statistics of a layer do not suit the layer that replaces it."""
    mean = getattr(old, "running_mean", None)
    if not isinstance(mean, Tensor) or mean.is_meta or not mean.any():
        return False
    if isinstance(new, BatchWhitening2d) and getattr(old, "running_var", None) is not None:
        return new.running != "matrix" and new.solver.name not in _EXACT_SOLVERS
    kept = [name for name in _STATISTICS if getattr(new, name, None) is not None]
    shapes = [
        [getattr(getattr(layer, name, None), "shape", None) for name in kept]
        for layer in (old, new)
    ]
    return not kept or shapes[0] != shapes[1]
