r"""Measure how well whitening layers whiten their input, and log it during training.

With :math:`S = \Sigma + \epsilon I`, the matrix that the layer inverts, and its whitening matrix W: eigenvalues and
trace of S, condition numbers of S and :math:`W S W^T` (before and after the layer), the residual
:math:`\lVert W S W^T - I \rVert_F / \sqrt{g}`, and the distance from the exact :math:`S^{-1/2}`,
:math:`\lVert W - S^{-1/2} \rVert_F / \lVert S^{-1/2} \rVert_F`.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from detectron2.engine import HookBase
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import NonFiniteCovarianceError, NonFiniteLayerError, check_minimum
from ..layers import BatchWhitening2d, GroupWhitening2d, Solver
from ..ops.batch_whitening.channel_groups import split
from ..ops.checks import autocast_off

WhiteningLayer = GroupWhitening2d | BatchWhitening2d
#: statistic -> its reduction over samples, groups and calls of a layer
REDUCTIONS = {
    "lambda_min": "min",
    "lambda_max": "max",
    "trace": "median",
    "condition_before": "median",
    "condition_after": "median",
    "residual": "median",
    "residual_max": "max",
    "distance": "median",
}
# solvers whose matrix is symmetric and approximates S^(-1/2)
_SYMMETRIC = ("newton", "zca")


def whitening_layers(model: nn.Module) -> dict[str, WhiteningLayer]:
    """Return the whitening layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, WhiteningLayer)}


@torch.no_grad()
def whitening_statistics(layer: WhiteningLayer, x: Tensor, samples: int = 8) -> dict[str, Tensor]:
    """Compute the statistics of :data:`REDUCTIONS` for every matrix that a layer whitens.

    Args:
        layer: a :class:`GroupWhitening2d`, or a :class:`BatchWhitening2d` (evaluation: its running statistics;
            training: the batch of this process).
        x: its input, (N, C, *spatial), finite.
        samples: the most samples to use where each has its own matrix.

    Returns:
        Statistic -> one value per matrix, on the CPU; empty for an empty batch.

    Raises:
        NonFiniteCovarianceError: the covariance of the input overflows.
    """
    with autocast_off(x.device.type):
        x = x if x.dtype == torch.float64 else x.float()
        solver = layer.solver
        pairs: list[tuple[Tensor, Tensor]] = []
        if isinstance(layer, GroupWhitening2d):
            if len(x):
                covariance = _covariance(x[:samples].reshape(min(len(x), samples), layer.num_groups, -1))
                pairs = [(covariance, solver(covariance))]
        elif x.transpose(0, 1).flatten(1).shape[1]:
            groups = split(x.transpose(0, 1).flatten(1), layer.channels_per_group)
            covariances = [_covariance(group) for group in groups]
            matrices = layer.batch_matrices(covariances) if layer.training else layer.running_matrices(x.dtype)
            pairs = list(zip(covariances, matrices, strict=True))
        found = [_statistics(covariance.double(), matrix.double(), solver) for covariance, matrix in pairs]
    return {name: torch.cat([values[name] for values in found] or [torch.empty(0)]) for name in REDUCTIONS}


def checked_statistics(name: str, layer: WhiteningLayer, x: Tensor, output: Tensor, samples: int) -> dict[str, Tensor]:
    """Compute :func:`whitening_statistics` of one call of the layer ``name``.

    Raises:
        NonFiniteLayerError: input, covariance, a parameter or output is not finite; the error names the layer.
    """
    try:
        # parameters are checked because a ReLU would hide an output of -inf
        for kind, value in {"input": x, **dict(layer.named_parameters()), "output": output}.items():
            if not torch.isfinite(value).all():
                raise NonFiniteCovarianceError(f"its {kind} is not finite")
        return whitening_statistics(layer, x.detach(), samples)
    except NonFiniteCovarianceError as error:
        raise NonFiniteLayerError(
            f"whitening layer ('{name}'): {error}. Fix: lower SOLVER.BASE_LR or check the weights."
        ) from error


def reduce_statistics(calls: Iterable[dict[str, Tensor]]) -> dict[str, float | None]:
    """Reduce the statistics of several calls to one value each; None where undefined."""
    calls = list(calls)
    reduced: dict[str, float | None] = {}
    for name, reduction in REDUCTIONS.items():
        values = torch.cat([call[name] for call in calls] or [torch.empty(0)])
        values = values[~values.isnan()]
        reduced[name] = float(getattr(values, reduction)()) if len(values) else None
    return reduced


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


def _covariance(rows: Tensor) -> Tensor:
    centered = rows - rows.mean(-1, keepdim=True)
    covariance = centered @ centered.mT / centered.shape[-1]
    if not torch.isfinite(covariance).all():
        raise NonFiniteCovarianceError(
            f"the covariance of its input, whose values reach {float(rows.abs().max()):.3g}, overflows {rows.dtype}"
        )
    return covariance


def _statistics(covariance: Tensor, matrix: Tensor, solver: Solver) -> dict[str, Tensor]:
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    eps = 0.0 if solver.name == "pivoted_cholesky" else solver.eps  # that solver adds nothing to the diagonal
    s = covariance + eps * identity
    eigenvalues, vectors = torch.linalg.eigh(s)
    eigenvalues = _positive(eigenvalues)
    after = matrix @ s @ matrix.mT
    after_values = _positive(torch.linalg.eigvalsh(after))
    residual = (after - identity).norm(dim=(-2, -1)) / len(identity) ** 0.5
    statistics = {
        "lambda_min": eigenvalues[..., 0],
        "lambda_max": eigenvalues[..., -1],
        "trace": s.diagonal(dim1=-2, dim2=-1).sum(-1),
        "condition_before": eigenvalues[..., -1] / eigenvalues[..., 0],
        "condition_after": after_values[..., -1] / after_values[..., 0],
        "residual": residual,
        "residual_max": residual,
        "distance": torch.full_like(residual, torch.nan),
    }
    if solver.name in _SYMMETRIC and not solver.corr:
        exact = (vectors * eigenvalues.rsqrt()[..., None, :]) @ vectors.mT
        statistics["distance"] = (matrix - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    return {name: value.flatten().cpu() for name, value in statistics.items()}


def _positive(eigenvalues: Tensor) -> Tensor:
    """Raise eigenvalues below float32 precision, the layers' precision, to its limit."""
    precision = torch.finfo(torch.float32)
    return eigenvalues.clamp_min(precision.eps * eigenvalues[..., -1:].clamp_min(precision.tiny))
