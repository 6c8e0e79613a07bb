"""Set scale and shift of norm layers so that their outputs have given means and variances."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConversionError, first_line

_CONSTANT = 1e-4  # of a deviation, which is about 1 with a scale of 1


class Moments(NamedTuple):
    """Mean and standard deviation of each channel of a layer's output, (C,) in float64."""

    mean: Tensor
    deviation: Tensor


def moments(model: nn.Module, inputs: Iterable[Any], layers: Mapping[str, nn.Module]) -> dict[str, Moments]:
    """Measure the outputs of layers in evaluation mode, before an activation inside of the layer.

    Args:
        model: the model that has the layers.
        inputs: its inputs, one per call.
        layers: the layers by name.

    Returns:
        The moments by name, in the order of the first calls. Layers that were not called are missing.
    """
    sums: dict[str, list[Tensor]] = {}

    def add(name: str, output: Tensor) -> None:
        if not output.numel():  # of a batch without regions
            return
        columns = output.transpose(0, 1).flatten(1).double()
        now = [torch.tensor(float(columns.shape[1])), columns.sum(1), columns.square().sum(1)]
        sums[name] = [a + b for a, b in zip(sums[name], now, strict=True)] if name in sums else now

    with _outputs(layers, add), _evaluation(model):
        for number, value in enumerate(inputs):
            try:
                model(value)
            except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
                kind = type(value).__name__
                raise ConversionError(
                    f"calibrate, input {number} ({kind}): the model fails with it: {first_line(error)}. "
                    "Fix: give what model(input) takes, e.g. [images for images, labels in loader]."
                ) from error
    found = {}
    for name, (count, total, squares) in sums.items():
        mean = total / count
        found[name] = Moments(mean, (squares / count - mean.square()).clamp_min(0).sqrt())
    return found


def relative_difference(found: Mapping[str, Moments], wanted: Mapping[str, Moments]) -> float:
    """Return the relative difference of means and deviations over all layers of ``wanted``.

    Layers that ``found`` lacks count as 0.
    """
    nothing = Moments(torch.zeros(()), torch.zeros(()))
    difference = sum(
        float((one - other).square().sum())
        for name, target in wanted.items()
        for one, other in zip(found.get(name, nothing), target, strict=True)
    )
    size = sum(float(values.square().sum()) for target in wanted.values() for values in target)
    return (difference / size) ** 0.5 if size else 0.0


def match_moments(
    model: nn.Module, inputs: Sequence[Any], layers: Mapping[str, nn.Module], wanted: Mapping[str, Moments]
) -> None:
    """Set scale and shift of layers, in the order of ``wanted``, so that their outputs have its moments.

    A layer changes the inputs of the later ones, so each costs a pass over the inputs. Signs of the scale stay.

    Raises:
        ConversionError: an output is not finite, or constant in every channel, or a layer is not reached.
    """
    for name, target in wanted.items():
        weight, bias = getattr(layers[name], "weight", None), getattr(layers[name], "bias", None)
        if weight is None or bias is None:
            continue
        sign = torch.where(weight.detach() < 0, -1.0, 1.0)
        with torch.no_grad():
            weight.fill_(1)
            bias.fill_(0)
        now = moments(model, inputs, {name: layers[name]}).get(name)
        if now is None:
            raise ConversionError(
                f"calibrate, {name}: the converted model does not reach this layer on these inputs. Fix: give more "
                "inputs, or keep the layer, by None in the plan."
            )
        if not all(bool(values.isfinite().all()) for values in (*now, *target)):
            raise ConversionError(f"calibrate, {name}: outputs are not finite. Fix: give other inputs.")
        varies = now.deviation > _CONSTANT
        if not varies.any():
            raise ConversionError(
                f"calibrate, {name}: outputs are constant on these inputs. Fix: give images that vary."
            )
        with torch.no_grad():
            weight.copy_(sign * torch.where(varies, target.deviation / now.deviation, 1))
            bias.copy_(target.mean - weight.double() * now.mean)


@contextmanager
def _outputs(layers: Mapping[str, nn.Module], use: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name, layer in layers.items():
            if getattr(layer, "fuses_relu", False) and not getattr(layer, "needs_relu", False):
                stack.enter_context(_separate_relu(layer))
            activation = getattr(layer, "act", None)
            if isinstance(activation, nn.Module):
                hook = activation.register_forward_pre_hook(lambda _, args, name=name: use(name, args[0]))
            else:
                hook = layer.register_forward_hook(lambda _, __, output, name=name: use(name, output))
            stack.enter_context(hook)
        yield


@contextmanager
def _separate_relu(layer: Any) -> Iterator[None]:
    """Let the caller of a layer that can fuse a ReLU apply it afterwards."""
    layer.fuses_relu = False
    try:
        yield
    finally:
        del layer.fuses_relu


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
