r"""Measure how well whitening layers whiten their input.

With :math:`S = \Sigma + \epsilon I`, the matrix that the layer inverts, and its whitening matrix W: eigenvalues and
trace of S, condition numbers of S and :math:`W S W^T` (before and after the layer), the residual
:math:`\lVert W S W^T - I \rVert_F / \sqrt{g}`, and the distance from the exact :math:`S^{-1/2}`,
:math:`\lVert W - S^{-1/2} \rVert_F / \lVert S^{-1/2} \rVert_F`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gw_detectron.errors import NonFiniteError
from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d, Solver
from gw_detectron.ops.batch_whitening import split
from gw_detectron.ops.checks import autocast_off

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
        NonFiniteError: the covariance of the input overflows.
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
        NonFiniteError: input, covariance, a parameter or output is not finite; the error names the layer.
    """
    try:
        # parameters are checked because a ReLU would hide an output of -inf
        for kind, value in {"input": x, **dict(layer.named_parameters()), "output": output}.items():
            if not torch.isfinite(value).all():
                raise NonFiniteError(f"its {kind} is not finite")
        return whitening_statistics(layer, x.detach(), samples)
    except NonFiniteError as error:
        raise NonFiniteError(
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


def _covariance(rows: Tensor) -> Tensor:
    centered = rows - rows.mean(-1, keepdim=True)
    covariance = centered @ centered.mT / centered.shape[-1]
    if not torch.isfinite(covariance).all():
        raise NonFiniteError(
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
