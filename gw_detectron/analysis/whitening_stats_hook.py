"""Training hook that logs whitening statistics and stops at non-finite layers."""

import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch
from detectron2.engine import HookBase
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import check_minimum
from .whitening_statistics import WhiteningLayer, checked_statistics, reduce_statistics, whitening_layers


class WhiteningStatsHook(HookBase):
    """Log the statistics of every whitening layer as ``whitening/<layer>/<statistic>``.

    The values go to Detectron2's event storage, and from there to TensorBoard and ``metrics.json``. The hook works with
    any of Detectron2's trainers. It observes the training forward pass only, not those of evaluation or PreciseBN, and
    costs nothing in the iterations between. The trainer's ``PeriodicWriter`` writes the latest values every 20
    iterations, so values of a shorter period are partly lost.

    Args:
        period: iterations between two observations.
        samples: the most samples of a layer to use.

    Raises:
        ConfigError: the period is not positive.
        NonFiniteLayerError: in training, if input, covariance, parameters or output of a layer are not finite.
    """

    def __init__(self, period: int, samples: int = 8) -> None:
        check_minimum("--whitening-stats-period", period)
        self.period = period
        self.samples = samples
        self._observing = ExitStack()

    def before_train(self) -> None:
        if not whitening_layers(self.trainer.model):
            logging.getLogger(__name__).warning("The model has no whitening layers: no whitening statistics to write.")

    def before_step(self) -> None:
        if self.trainer.iter % self.period:
            return
        model = self.trainer.model
        model = model.module if isinstance(model, DistributedDataParallel) else model
        calls: dict[str, list[dict[str, Tensor]]] = {}
        self._observing.enter_context(torch.compiler.set_stance("force_eager"))  # compiled modules call no new hooks
        for name, layer in whitening_layers(model).items():
            self._observing.enter_context(layer.register_forward_hook(self._observer(name, model, calls)))
        self._observing.enter_context(model.register_forward_hook(lambda model, *_: self._finish(model, calls)))

    def after_step(self) -> None:
        self._observing.close()  # needed if this step did not run the model

    def after_train(self) -> None:
        self._observing.close()  # needed if the last step failed

    def _finish(self, model: nn.Module, calls: dict[str, list[dict[str, Tensor]]]) -> None:
        if not model.training:
            return
        self._observing.close()  # other hooks may run the model again before this hook's after_step
        storage = get_event_storage()
        for layer, observed in calls.items():
            for name, value in reduce_statistics(observed).items():
                if value is not None:
                    storage.put_scalar(f"whitening/{layer}/{name}", value, smoothing_hint=False)

    def _observer(self, name: str, model: nn.Module, calls: dict[str, list[dict[str, Tensor]]]) -> Callable[..., None]:
        def observe(layer: WhiteningLayer, args: tuple, output: Tensor) -> None:
            if not model.training:
                return
            try:
                calls.setdefault(name, []).append(checked_statistics(name, layer, args[0], output, self.samples))
            except FloatingPointError:
                self._observing.close()  # the search for the cause runs the model again
                raise

        return observe
