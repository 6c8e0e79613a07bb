"""A hook of the training that writes what the whitening layers do, and names the first that is no longer finite."""

from collections.abc import Callable
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils.events import get_event_storage
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .spectra import WhiteningLayer, reduce_spectra, spectra, whitening_layers


class WhiteningWatch(HookBase):
    """Writes the numbers of :mod:`.spectra` of every whitening layer to the event storage, and so to TensorBoard and
    ``metrics.json``, as ``whitening/<layer>/<number>``.

    Register it with any of Detectron2's trainers. In the iterations between it costs nothing.

    Args:
        period: iterations from one look to the next.
        samples: the most samples of a layer that are looked at.

    Raises:
        ValueError: the period is not positive.
        FloatingPointError: from the training, when the input or output of a layer is not finite; it names the layer.
    """

    def __init__(self, period: int, samples: int = 8) -> None:
        if period < 1:
            raise ValueError(f"the period of whitening statistics is {period} iterations, it has to be 1 or more")
        self.period = period
        self.samples = samples
        self._handles: list[Any] = []

    def before_step(self) -> None:
        if self.trainer.iter % self.period:
            return
        model = self.trainer.model
        model = model.module if isinstance(model, DistributedDataParallel) else model
        found: dict[str, list[dict[str, Tensor]]] = {}
        for name, layer in whitening_layers(model).items():
            self._handles.append(layer.register_forward_hook(self._observer(name, found)))
        self._handles.append(model.register_forward_hook(lambda *_: _write(found)))

    def after_step(self) -> None:
        self._stop()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _observer(self, name: str, found: dict[str, list[dict[str, Tensor]]]) -> Callable[..., None]:
        def observe(layer: WhiteningLayer, args: tuple, output: Tensor) -> None:
            for what, value in (("input", args[0]), ("output", output)):
                if not torch.isfinite(value).all():
                    self._stop()  # what looks for the cause runs the model again
                    raise FloatingPointError(f"the {what} of the whitening layer {name} is not finite")
            found.setdefault(name, []).append(spectra(layer, args[0].detach(), self.samples))

        return observe


def _write(found: dict[str, list[dict[str, Tensor]]]) -> None:
    storage = get_event_storage()
    for layer, calls in found.items():
        for name, value in reduce_spectra(calls).items():
            if value is not None:
                storage.put_scalar(f"whitening/{layer}/{name}", value, smoothing_hint=False)
