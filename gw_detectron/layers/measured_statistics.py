"""Fit trained weights to images: BN's statistics where they are lost or of other images, GW's scale in its place."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.group_whitening.op import whiten
from .group_whitening import GroupWhitening2d
from .mixed_norms import MixedNorm
from .moments import Moments, add_moments

#: standard deviation of whitened input; that of images is above 0.1
_CONSTANT = 1e-3
_NOT_CALLED = (
    "no {} layer of the model was called. Fix: call this model in the context, and before torch.compile: a compiled "
    "model that has run ignores hooks."
)
_NOT_FINITE = "{}: its input has NaN or infinite values; nothing is changed. Fix: leave out the images with them."


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
    image's, whose function would change. So is a context in which no layer is called, or one whose input is not
    finite.
    """
    layers = _bn_layers(model)
    for name, layer in layers.items():
        if isinstance(layer, MixedNorm) and any(layer.mixture):
            raise ValueError(
                f"{name}: mixes statistics of images. Fix: measure the BN network, then convert it."
            )

    sums: dict[nn.Module, Moments] = {}
    with _hooks(layers.values(), _adding_to(sums)):
        yield
    if layers and not sums:
        raise ValueError(_NOT_CALLED.format("BN"))
    for name, layer in layers.items():
        if layer in sums and not _is_finite(sums[layer]):
            raise ValueError(_NOT_FINITE.format(name))
    for layer, measured in sums.items():
        _set_statistics(layer, measured)


@contextmanager
def adapt_statistics(model: nn.Module) -> Iterator[None]:
    r"""Set mean and variance of BN layers to those of other images: of the batches in this context.

    Scale and shift stay, so the network computes another function: one that fits images of another camera, light or
    laboratory, without labels:

    .. code-block:: python

        with torch.no_grad(), adapt_statistics(model.backbone):
            for batch in batches:  # of about eight images of the new place each
                model(batch)

    In this context, each layer normalizes by the statistics of its batch, as BN does in training, so that the next
    layer sees input of the size that it will see. Afterwards it has their averages over the images.

    Args:
        model: a network in evaluation mode. BN and FrozenBN with scale and shift are adapted, if they are called in
            this context, which should be without gradients. FrozenBN whose statistics were multiplied into the scale
            needs :func:`measure_statistics` first.

    A model without such a layer is a ValueError, and so is a layer in training mode, a context in which no layer is
    called, or an input that is not finite. After an error, the statistics are those of before.

    Source: Li et al., Revisiting Batch Normalization for Practical Domain Adaptation (AdaBN, arXiv 1603.04779).
    """
    layers = _bn_layers(model)
    if not layers:
        raise ValueError("the model has no BN layer with statistics, scale and shift.")
    before = {
        layer: (layer.running_mean.clone(), layer.running_var.clone())
        for layer in layers.values()
    }
    totals: dict[nn.Module, Any] = defaultdict(float)
    images: dict[nn.Module, int] = defaultdict(int)

    @torch.no_grad()
    def take(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if x.numel():
            others = [0, *range(2, x.dim())]
            variance, mean = torch.var_mean(x.double(), others, correction=0)
            _set_buffers(layer, mean, variance)
            # as BN's running average of the unbiased variance
            count = x.numel() // x.shape[1]
            unbiased = variance * count / max(count - 1, 1)
            totals[layer] = totals[layer] + torch.stack((mean, unbiased)) * len(x)
            images[layer] += len(x)

    try:
        with _hooks(layers.values(), take):
            yield
        if not images:
            raise ValueError(_NOT_CALLED.format("BN"))
        for name, layer in layers.items():
            if layer in images:
                mean, variance = totals[layer] / images[layer]
                if not totals[layer].isfinite().all():
                    raise ValueError(_NOT_FINITE.format(name))
                _set_buffers(layer, mean, variance)
    except BaseException:
        for layer, statistics in before.items():
            _set_buffers(layer, *statistics)
        raise


@contextmanager
def match_scales(model: nn.Module) -> Iterator[None]:
    r"""Divide the scales of GW layers by the standard deviation of what they multiply, in this context.

    That is 1 after BN, and about 0.7 after GW with five Newton steps. So GW that has replaced BN by
    :func:`~gw_detectron.convert_norms` gives the next layer inputs of the size that it was trained for:

    .. code-block:: python

        convert_norms(model.backbone, {"S1-B1": "GW"})
        with torch.no_grad(), match_scales(model.backbone):
            model(batch)

    Args:
        model: a network. The first batch in this context counts; each layer is corrected before it runs, so that the
            next one sees corrected input. Use it once: each context divides again.

    A constant batch is a ValueError, and so is a context in which no layer is called.
    """
    layers = {
        layer
        for layer in model.modules()
        if isinstance(layer, GroupWhitening2d) and layer.weight is not None
    }
    left = set(layers)

    @torch.no_grad()
    def divide(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        if layer in left:
            left.remove(layer)
            whitened = whiten(
                inputs[0], None, None, layer.num_groups, layer.solver, False
            )
            deviation = whitened.std()
            if not _CONSTANT < deviation < torch.inf:
                raise ValueError(
                    f"the input of a GW layer with {layer.num_channels} channels is constant or not finite. Fix: give "
                    "a batch of images with content."
                )
            layer.weight.div_(deviation)

    with _hooks(layers, divide):
        yield
    if layers and left == layers:
        raise ValueError(_NOT_CALLED.format("GW"))


def _bn_layers(model: nn.Module) -> dict[str, Any]:
    """Return BN layers with statistics, scale and shift by name; they must be in evaluation mode."""
    needed = ("weight", "bias", "running_mean", "running_var")
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if all(getattr(layer, tensor, None) is not None for tensor in needed)
    }
    for name, layer in layers.items():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.training:
            raise ValueError(f"{name}: in training mode. Fix: call model.eval() first.")
    return layers


@contextmanager
def _hooks(layers: Iterable[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """Call a function before each call of some layers, in this context."""
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adding_to(sums: dict[nn.Module, Moments]) -> Callable[..., None]:
    def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if x.numel():
            rows = x.detach().double().movedim(1, 0).flatten(1)
            add_moments(sums, layer, Moments.of(rows, full=False))

    return add


def _is_finite(moments: Moments) -> bool:
    return bool(torch.stack((moments.mean, moments.scatter)).isfinite().all())


@torch.no_grad()
def _set_statistics(layer: Any, measured: Moments) -> None:
    mean = measured.mean
    variance = measured.scatter / measured.count

    before = (layer.running_var.double() + layer.eps).sqrt()
    slope = layer.weight.double() / before
    layer.bias.copy_(layer.bias + slope * (mean - layer.running_mean))
    layer.weight.copy_(slope * (variance + layer.eps).sqrt())
    _set_buffers(layer, mean, variance)


@torch.no_grad()
def _set_buffers(layer: Any, mean: Tensor, variance: Tensor) -> None:
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(variance)
