"""PreciseBN for batch whitening too."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils.events import EventStorage
from fvcore.nn.precise_bn import get_bn_modules, update_bn_stats
from torch import nn

from ..layers import BatchRenorm2d, BatchWhitening2d


def update_statistics(model: nn.Module, batches: Iterable[Any], num_iters: int) -> None:
    """Recompute the running statistics of BN and batch whitening with fixed weights.

    BN's are those of fvcore's ``update_bn_stats``; Batch Renormalization is BN meanwhile. Batch whitening's running
    mean and its running matrix or covariance become the averages over the batches. Layers in evaluation mode keep
    theirs.

    Args:
        model: the model, called with each batch.
        batches: at least ``num_iters`` of them.
        num_iters: batches to use.

    Source: Rethinking "Batch" in BatchNorm (arXiv 2105.07576), section 3.
    """
    whitening = [layer for layer in model.modules() if isinstance(layer, BatchWhitening2d) and layer.training]
    momenta = [layer.momentum for layer in whitening]
    renorms = [layer for layer in model.modules() if isinstance(layer, BatchRenorm2d)]
    schedules = [(layer.rmax, layer.dmax, layer.num_batches_tracked.clone()) for layer in renorms]
    for renorm in renorms:
        renorm.rmax, renorm.dmax = 1.0, 0.0
    batches = _averaged(whitening, itertools.islice(batches, num_iters))
    try:
        if get_bn_modules(model):
            update_bn_stats(model, batches, num_iters)
        elif whitening:
            with torch.no_grad():
                for batch in batches:
                    model(batch)
    finally:
        for layer, momentum in zip(whitening, momenta, strict=True):
            layer.momentum = momentum
        for renorm, (rmax, dmax, count) in zip(renorms, schedules, strict=True):
            renorm.rmax, renorm.dmax = rmax, dmax
            renorm.num_batches_tracked.copy_(count)


def _averaged(layers: list[BatchWhitening2d], batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; the running averages of the layers become averages over them."""
    for number, batch in enumerate(batches, 1):
        for layer in layers:
            layer.momentum = 1 / number
        yield batch


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
