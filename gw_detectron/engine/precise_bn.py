"""PreciseBN for batch whitening too."""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils.events import EventStorage
from fvcore.nn.precise_bn import get_bn_modules
from torch import Tensor, nn

from ..layers import BatchRenorm2d, BatchWhitening2d


def update_statistics(model: nn.Module, batches: Iterable[Any], num_iters: int) -> None:
    r"""Recompute the running statistics of BN and batch whitening with fixed weights.

    From the mean :math:`\mu_k` and variance :math:`\sigma_k^2` of each call with :math:`n_k` elements per channel, BN's
    become those of all elements, as in fvcore: :math:`\mu = \sum_k n_k \mu_k / \sum_k n_k` and
    :math:`\sigma^2 = \sum_k n_k (\sigma_k^2 + \mu_k^2) / \sum_k n_k - \mu^2`. Batch Renormalization is BN meanwhile.
    Batch whitening's running mean and its running matrix or covariance become their averages over the calls.

    A call with less than two elements per channel, such as that of a head for images without regions, counts nothing.
    A layer without another call, in evaluation mode or without running statistics keeps what it has. After an error,
    all do.

    Args:
        model: the model, called with each batch. It may use a layer more than once.
        batches: at least ``num_iters`` of them.
        num_iters: batches to use.

    Source: Rethinking "Batch" in BatchNorm (arXiv 2105.07576), section 3.
    """
    layers = [layer for layer in get_bn_modules(model) if layer.running_mean is not None]
    layers += [layer for layer in model.modules() if isinstance(layer, BatchWhitening2d) and layer.training]
    if not layers:
        return
    averages = []
    with contextlib.ExitStack() as stack:
        for layer in layers:
            averages.append(average := _Average(layer))
            stack.callback(average.restore)
            stack.enter_context(layer.register_forward_hook(average.add))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled modules do not call new hooks
        for batch in itertools.islice(batches, num_iters):
            model(batch)
    for average in averages:
        average.write()


class _Average:
    """Average of the batch statistics of a layer over its calls.

    The running statistics are those of the last batch meanwhile.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        second = f"running_{layer.running}" if isinstance(layer, BatchWhitening2d) else "running_var"
        self._buffers = [layer.running_mean, layer.get_buffer(second)]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._sums = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in self._buffers]
        self._weight = 0
        self._momentum, layer.momentum = layer.momentum, 1.0
        if isinstance(layer, BatchRenorm2d):
            self._schedule = layer.rmax, layer.dmax, layer.num_batches_tracked.clone()
            layer.rmax, layer.dmax = 1.0, 0.0

    def add(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        count = inputs[0].numel() // inputs[0].shape[1]
        if count < 2:
            return
        mean, second = (buffer.double() for buffer in self._buffers)
        weight = 1
        if not isinstance(layer, BatchWhitening2d):
            weight, second = count, second * (count - 1) / count + mean**2
        self._weight += weight
        for total, value in zip(self._sums, (mean, second), strict=True):
            total += weight * value

    def restore(self) -> None:
        """Set the layer as it was."""
        self.layer.momentum = self._momentum
        if isinstance(self.layer, BatchRenorm2d):
            self.layer.rmax, self.layer.dmax, number = self._schedule
            self.layer.num_batches_tracked.copy_(number)
        for buffer, value in zip(self._buffers, self._before, strict=True):
            buffer.copy_(value)

    def write(self) -> None:
        """Set the running statistics to the averages, if there are any."""
        if not self._weight:
            return
        mean, second = (total / self._weight for total in self._sums)
        if not isinstance(self.layer, BatchWhitening2d):
            second -= mean**2
        for buffer, value in zip(self._buffers, (mean, second), strict=True):
            buffer.copy_(value)


class PreciseStatistics(HookBase):
    """Detectron2's ``PreciseBN`` hook, for batch whitening too.

    It runs every ``period`` iterations, if that is not 0, and after the last one.

    Args:
        period: iterations between two runs.
        model: see :func:`update_statistics`.
        batches: batches of training data without end.
        num_iters: batches of each run.
    """

    def __init__(self, period: int, model: nn.Module, batches: Iterable[Any], num_iters: int) -> None:
        self._period, self._model, self._num_iters = period, model, num_iters
        self._source, self._batches = batches, iter(())

    def before_train(self) -> None:
        self._batches = iter(self._source)

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done == self.trainer.max_iter or (self._period > 0 and done % self._period == 0):
            with EventStorage():  # losses of these batches are not the training's
                update_statistics(self._model, self._batches, self._num_iters)
