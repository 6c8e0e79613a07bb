"""A hook of the training that writes what the whitening layers do, and names the first that is no longer finite."""

import logging
from collections.abc import Callable
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .spectra import WhiteningLayer, observed, reduce_spectra, whitening_layers


class WhiteningWatch(HookBase):
    """Writes the numbers of :mod:`.spectra` of every whitening layer to the event storage, and so to TensorBoard and
    ``metrics.json``, as ``whitening/<layer>/<number>``.

    Register it with any of Detectron2's trainers. It looks at the model's own forward pass in training, not at those of
    an evaluation or of PreciseBN. In the iterations between it costs nothing. The trainer's ``PeriodicWriter`` writes
    the latest numbers every 20 iterations, so that of a shorter period some are never written.

    Args:
        period: iterations from one look to the next.
        samples: the most samples of a layer that are looked at.

    Raises:
        ValueError: the period is not positive.
        FloatingPointError: from the training, when a layer's input, its covariance or its output is not finite; it
            names the layer.
    """

    def __init__(self, period: int, samples: int = 8) -> None:
        if period < 1:
            raise ValueError(f"the period of whitening statistics is {period} iterations, it has to be 1 or more")
        self.period = period
        self.samples = samples
        self._handles: list[Any] = []

    def before_train(self) -> None:
        if not whitening_layers(self.trainer.model):
            log = logging.getLogger(__name__)
            log.warning("the model has no whitening layers, so that there are no whitening statistics to write")

    def before_step(self) -> None:
        if self.trainer.iter % self.period:
            return
        model = self.trainer.model
        model = model.module if isinstance(model, DistributedDataParallel) else model
        found: dict[str, list[dict[str, Tensor]]] = {}
        for name, layer in whitening_layers(model).items():
            self._handles.append(layer.register_forward_hook(self._observer(name, model, found)))
        self._handles.append(model.register_forward_hook(lambda model, *_: self._finish(model, found)))

    def after_step(self) -> None:
        self._stop()  # if this step has not run the model

    def _finish(self, model: nn.Module, found: dict[str, list[dict[str, Tensor]]]) -> None:
        if model.training:
            self._stop()  # other hooks run the model again before this one's after_step
            _write(found)

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _observer(self, name: str, model: nn.Module, found: dict[str, list[dict[str, Tensor]]]) -> Callable[..., None]:
        def observe(layer: WhiteningLayer, args: tuple, output: Tensor) -> None:
            if not model.training:
                return
            try:
                found.setdefault(name, []).append(observed(name, layer, args[0], output, self.samples))
            except FloatingPointError:
                self._stop()  # what looks for the cause runs the model again
                raise

        return observe


def _write(found: dict[str, list[dict[str, Tensor]]]) -> None:
    storage = get_event_storage()
    for layer, calls in found.items():
        for name, value in reduce_spectra(calls).items():
            if value is not None:
                storage.put_scalar(f"whitening/{layer}/{name}", value, smoothing_hint=False)
