r"""What a whitening layer does to the covariance of its input, in numbers.

With :math:`S = \Sigma + \epsilon I`, which the layer inverts, and its whitening matrix W: eigenvalues and trace of S,
the condition numbers of S and of :math:`W S W^T`, which is what follows the layer, the residual
:math:`\lVert W S W^T - I \rVert_F / \sqrt{g}`, and the distance
:math:`\lVert W - S^{-1/2} \rVert_F / \lVert S^{-1/2} \rVert_F` from the exact :math:`S^{-1/2}`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..layers import BatchWhitening2d, FrozenBatchWhitening2d, GroupWhitening2d, Solver
from ..ops.batch_whitening.channel_groups import split, split_matrices
from ..ops.solvers import NonFiniteCovarianceError
from ..ops.tensors import autocast_off

WhiteningLayer = GroupWhitening2d | BatchWhitening2d
#: name of a number -> how it is brought together over samples, groups and calls of a layer
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
# solvers whose matrix is symmetric, and aims at S^(-1/2)
_SYMMETRIC = ("newton", "zca")


def whitening_layers(model: nn.Module) -> dict[str, WhiteningLayer]:
    """The whitening layers of a model by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, WhiteningLayer)}


@torch.no_grad()
def spectra(layer: WhiteningLayer, x: Tensor, samples: int = 8) -> dict[str, Tensor]:
    """Computes the numbers of :data:`REDUCTIONS` for every matrix that a layer whitens.

    Args:
        layer: a :class:`GroupWhitening2d`, or a :class:`BatchWhitening2d`, whose running statistics are taken in
            evaluation, and the batch of this process in training.
        x: its input, (N, C, *spatial), finite.
        samples: the most samples that are looked at if each has its own matrix.

    Returns:
        name -> one number for each matrix, on the CPU; without matrices, of a batch without samples, empty tensors.

    Raises:
        NonFiniteCovarianceError: the input is so large that its covariance overflows.
    """
    with autocast_off(x.device.type):
        return _spectra(layer, x, samples)


def observed(name: str, layer: WhiteningLayer, x: Tensor, output: Tensor, samples: int) -> dict[str, Tensor]:
    """:func:`spectra` of a call of the layer ``name``.

    Raises:
        FloatingPointError: input, its covariance, a parameter or output is not finite; it names the layer.
    """
    # a ReLU would hide an output of -inf, which comes of the parameters
    for what, value in {"input": x, **dict(layer.named_parameters()), "output": output}.items():
        if not torch.isfinite(value).all():
            raise FloatingPointError(f"the {what} of the whitening layer {name} is not finite")
    try:
        return spectra(layer, x.detach(), samples)
    except NonFiniteCovarianceError as error:
        raise FloatingPointError(f"the whitening layer {name}: {error}") from error


def _spectra(layer: WhiteningLayer, x: Tensor, samples: int) -> dict[str, Tensor]:
    x = x if x.dtype == torch.float64 else x.float()
    solver = layer.solver
    parts = []
    if isinstance(layer, GroupWhitening2d):
        if len(x):
            covariance = _covariance(x[:samples].reshape(min(len(x), samples), layer.num_groups, -1))
            parts.append((covariance, solver(covariance)))
    else:
        columns = x.transpose(0, 1).flatten(1)
        if columns.shape[1]:
            covariances = [_covariance(group) for group in split(columns, layer.channels_per_group)]
            parts = list(zip(covariances, _batch_matrices(layer, solver, covariances), strict=True))
    eps = 0.0 if layer.solver.name == "pivoted_cholesky" else layer.solver.eps  # which adds nothing to the diagonal
    found = [_numbers(covariance.double(), matrix.double(), eps, layer) for covariance, matrix in parts]
    return {name: torch.cat([numbers[name] for numbers in found] or [torch.empty(0)]) for name in REDUCTIONS}


def reduce_spectra(found: Iterable[dict[str, Tensor]]) -> dict[str, float | None]:
    """Brings the numbers of several calls together; None for what is not defined."""
    calls = list(found)
    reduced: dict[str, float | None] = {}
    for name, how in REDUCTIONS.items():
        values = torch.cat([call[name] for call in calls] or [torch.empty(0)])
        values = values[~values.isnan()]
        reduced[name] = float(getattr(values, how)()) if len(values) else None
    return reduced


def _covariance(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(-1, keepdim=True)
    covariance = centred @ centred.mT / centred.shape[-1]
    if not torch.isfinite(covariance).all():
        raise NonFiniteCovarianceError(
            f"the covariance of its input, whose values reach {float(rows.abs().max()):.3g}, overflows {rows.dtype}"
        )
    return covariance


def _batch_matrices(layer: BatchWhitening2d, solver: Solver, covariances: list[Tensor]) -> list[Tensor]:
    if layer.training and not isinstance(layer, FrozenBatchWhitening2d):
        return [solver(covariance) for covariance in covariances]
    if layer.running == "matrix":
        return split_matrices(layer.running_matrix)
    return [solver(covariance) for covariance in split_matrices(layer.running_covariance)]


def _numbers(covariance: Tensor, matrix: Tensor, eps: float, layer: WhiteningLayer) -> dict[str, Tensor]:
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    s = covariance + eps * identity
    eigenvalues, vectors = torch.linalg.eigh(s)
    eigenvalues = _positive(eigenvalues)
    after = matrix @ s @ matrix.mT
    after_values = _positive(torch.linalg.eigvalsh(after))
    residual = (after - identity).norm(dim=(-2, -1)) / len(identity) ** 0.5
    numbers = {
        "lambda_min": eigenvalues[..., 0],
        "lambda_max": eigenvalues[..., -1],
        "trace": s.diagonal(dim1=-2, dim2=-1).sum(-1),
        "condition_before": eigenvalues[..., -1] / eigenvalues[..., 0],
        "condition_after": after_values[..., -1] / after_values[..., 0],
        "residual": residual,
        "residual_max": residual,
        "distance": torch.full_like(residual, torch.nan),
    }
    if layer.solver.name in _SYMMETRIC and not layer.solver.corr:
        exact = (vectors * eigenvalues.rsqrt()[..., None, :]) @ vectors.mT
        numbers["distance"] = (matrix - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    return {name: value.flatten().cpu() for name, value in numbers.items()}


def _positive(eigenvalues: Tensor) -> Tensor:
    """Lifts eigenvalues that cannot be told from zero in float32, the layers' precision, to the least that can be."""
    precision = torch.finfo(torch.float32)
    return eigenvalues.clamp_min(precision.eps * eigenvalues[..., -1:].clamp_min(precision.tiny))
