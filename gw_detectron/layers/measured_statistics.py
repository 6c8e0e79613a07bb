"""Measure the statistics of BN layers, of weights that have lost them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .mixed_norms import MixedNorm
from .moments import Moments, add_moments


@contextmanager
def measure_statistics(model: nn.Module) -> Iterator[None]:
    r"""Set mean and variance of BN layers to those of their input in this context.

    Scale and shift change with them, so that the network computes the same function:

    .. math::
        \gamma' = \gamma \sqrt{\frac{v' + \epsilon}{v + \epsilon}}, \quad
        \beta' = \beta + \gamma \frac{m' - m}{\sqrt{v + \epsilon}}

    For weights whose statistics were multiplied into the scale, such as Caffe2's and the detectors that were
    trained from them. Then MixGW can mix:

    .. code-block:: python

        with torch.no_grad(), measure_statistics(model.backbone):
            for batch in batches:  # of the training images
                model(batch)
        convert_norms(model.backbone, {"*.conv2.norm": "MixGW"})

    Args:
        model: a network in evaluation mode. BN and FrozenBN with scale and shift are measured, if they are
            called in this context, which should be without gradients.

    A layer that trains by the statistics of its batch is a ValueError, and so is one that mixes in an
    image's, whose function would change.
    """
    layers = {name: layer for name, layer in model.named_modules() if _is_bn(layer)}
    for name, layer in layers.items():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.training:
            raise ValueError(f"{name}: in training mode. Fix: call model.eval() first.")
        if isinstance(layer, MixedNorm) and any(layer.mixture):
            raise ValueError(
                f"{name}: mixes statistics of images. Fix: measure the BN network, then convert it."
            )

    sums: dict[nn.Module, Moments] = {}
    hooks = [
        layer.register_forward_pre_hook(_adding_to(sums)) for layer in layers.values()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for layer, measured in sums.items():
        _set_statistics(layer, measured)


def _is_bn(layer: nn.Module) -> bool:
    names = ("weight", "bias", "running_mean", "running_var")
    return all(getattr(layer, name, None) is not None for name in names)


def _adding_to(sums: dict[nn.Module, Moments]) -> Callable[..., None]:
    def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if x.numel():
            rows = x.detach().double().movedim(1, 0).flatten(1)
            add_moments(sums, layer, Moments.of(rows, full=False))

    return add


@torch.no_grad()
def _set_statistics(layer: Any, measured: Moments) -> None:
    mean = measured.mean
    variance = measured.scatter / measured.count

    before = (layer.running_var.double() + layer.eps).sqrt()
    slope = layer.weight.double() / before
    layer.bias.copy_(layer.bias + slope * (mean - layer.running_mean))
    layer.weight.copy_(slope * (variance + layer.eps).sqrt())
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)
