r"""Forward and backward pass in closed form, composed of backend steps.

Only the input, its means and its covariances are saved for backward, and y if a ReLU is fused, as nn.ReLU would.
The affine parameters are part of the products. With :math:`G_j = dY_j X_{C,j}^T` for channel j of each group, the same
g x g matrices give the gradient of the whitening matrix, :math:`\sum_j \mathrm{diag}(\gamma_j) G_j`, and that of
:math:`\gamma_j`, the row sums of :math:`G_j \odot W`. So y is neither saved nor recomputed for them.

Source: Group Whitening supplement, Algorithms 1-2.
"""

from collections.abc import Iterable
from functools import reduce
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..checks import autocast_off, compute_dtype, memory_format_of

#: elements of a sum of matrices from which it is faster to add one by one: the products would leave the caches
_LARGE_SUM = 2**17


class InputGradient(NamedTuple):
    r"""Coefficients of the input gradient, one of each per sample.

    .. math:: dX = W (\gamma \, dY) + S X_C - s
    """

    whitening: Tensor  # W, (N, g, g)
    slope: Tensor  # S, 2 / M times the symmetric dL/dSigma, (N, g, g)
    shift: Tensor  # s, (N, g)


class Backend(Protocol):
    """The steps that a backend implements.

    Shapes: ``x`` (N, C, *spatial), in g groups of C / g channels; ``mean`` (N, g); ``sigma`` and ``whitening``
    (N, g, g); ``weight`` and ``bias`` (C,) or None.
    """

    def prepare(self, x: Tensor) -> Tensor:
        """Return ``x``, copied if its memory layout is not accepted."""

    def samples_per_pass(self, x: Tensor, groups: int) -> int:
        """Return the number of samples per pass of the backward loop."""

    def statistics(self, x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance without eps of each sample."""

    def large_means(self, mean: Tensor, variances: Tensor) -> Tensor | None:
        """Return the means that must be subtracted from x before the products, which would cancel digits.

        ``variances`` is (N, g). The means are zero in samples where none must. None: in no sample.
        """

    def newton(self, sigma: Tensor, num_iters: int) -> Tensor:
        """Return :func:`gw_detectron.layers.newton_inverse_sqrt` of ``sigma``."""

    def newton_backward(self, sigma: Tensor, grad: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
        """Return the whitening matrices and the symmetric dL/dSigma, given ``grad`` = dL/dW."""

    def apply(
        self,
        x: Tensor,
        mean: Tensor,
        whitening: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        relu: bool,
        out: Tensor,
    ) -> None:
        """Write y to ``out``.

        y = weight * (W (x - mean)) + bias, then ReLU if ``relu``.
        """

    def grad_products(
        self, x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the products of gradient and input, and the gradient sums.

        G_j = dY_j X_C,j^T for channel j of each group, and the sums of dY over positions.
        ``y`` is the output of a fused ReLU or None. With it, dY is ``dy`` masked to zero where y <= 0, and the masked
        gradient is stored in ``out``. Without it, ``out`` is unchanged.

        Returns:
            (C / g, N, g, g), which the next call may overwrite, and (C / g, N, g).
        """

    def apply_backward(
        self, x: Tensor, mean: Tensor, dy: Tensor, weight: Tensor | None, terms: InputGradient, out: Tensor
    ) -> None:
        """Write dX (see :class:`InputGradient`) to ``out``, which may be ``dy``."""


def forward(
    backend: Backend,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    num_iters: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output and the statistics saved for backward.

    Returns:
        y, the means (N, g) and the covariances with eps (N, g, g).
    """
    with autocast_off(x.device.type):
        memory_format, x = memory_format_of(x), backend.prepare(x)
        if x.numel() == 0:  # there is no column to average
            mean = x.new_zeros((len(x), groups), dtype=compute_dtype(x))
            return torch.empty_like(x), mean, mean.new_zeros((len(x), groups, groups))
        y, saved = torch.empty_like(x), []
        for x_part, y_part in _passes(backend, groups, x, y):
            mean, sigma = backend.statistics(x_part, groups)
            large = backend.large_means(mean, sigma.diagonal(dim1=1, dim2=2).add_(eps))
            if large is not None:
                x_part = _subtract(x_part, large)
                mean, sigma = backend.statistics(x_part, groups)
                sigma.diagonal(dim1=1, dim2=2).add_(eps)
            backend.apply(x_part, mean, backend.newton(sigma, num_iters), weight, bias, relu, out=y_part)
            saved.append((mean if large is None else large + mean, sigma))
        mean, sigma = saved[0] if len(saved) == 1 else map(torch.cat, zip(*saved, strict=True))
        return y.contiguous(memory_format=memory_format), mean, sigma


def backward(
    backend: Backend,
    dy: Tensor,
    y: Tensor | None,
    x: Tensor,
    mean: Tensor,
    sigma: Tensor,
    weight: Tensor | None,
    num_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias.

    Those of weight and bias are (C,), in the compute dtype. ``y`` is the output of the forward pass if a ReLU was
    fused, else None.
    """
    with autocast_off(x.device.type):
        memory_format, groups = memory_format_of(x), mean.shape[1]
        x, dy, y = backend.prepare(x), backend.prepare(dy), None if y is None else backend.prepare(y)
        if x.numel() == 0:
            return torch.empty_like(x), mean.new_zeros(x.shape[1]), mean.new_zeros(x.shape[1])
        channels = x.shape[1] // groups
        columns = x.numel() // (len(x) * groups)
        scale = None if weight is None else weight.to(mean.dtype).reshape(groups, channels).mT
        dx = torch.empty_like(x)
        dweights, dbiases = [], []
        for x_part, y_part, dy_part, dx_part, mean_part, sigma_part in _passes(
            backend, groups, x, y, dy, dx, mean, sigma
        ):
            large = backend.large_means(mean_part, sigma_part.diagonal(dim1=1, dim2=2))
            if large is not None:
                x_part, mean_part = _subtract(x_part, large), mean_part - large
            products, sums = backend.grad_products(x_part, mean_part, dy_part, groups, y_part, out=dx_part)
            if y is not None:
                dy_part = dx_part  # masked by the ReLU
            dbiases.append(sums.sum(1))
            grad_whitening = products.sum(0) if scale is None else _scaled_sum(products, scale[:, None, :, None])
            whitening, grad_sigma = backend.newton_backward(sigma_part, grad_whitening, num_iters)
            dweights.append(products.mul_(whitening).sum((1, 3)))
            if scale is not None:
                sums = sums * scale[:, None]
            shift = (whitening @ (sums.sum(0) / columns)[..., None])[..., 0]
            terms = InputGradient(whitening, grad_sigma.mul_(2 / columns), shift)
            backend.apply_backward(x_part, mean_part, dy_part, weight, terms, out=dx_part)
        dweight, dbias = (reduce(torch.add, parts) for parts in (dweights, dbiases))
        return dx.contiguous(memory_format=memory_format), dweight.mT.flatten(), dbias.mT.flatten()


def _passes(backend: Backend, groups: int, x: Tensor, *others: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """Split tensors into the samples of each pass."""
    step = backend.samples_per_pass(x, groups)
    if step >= len(x):
        return [(x, *others)]
    return zip(*(repeat(None) if tensor is None else tensor.split(step) for tensor in (x, *others)), strict=False)


def _subtract(x: Tensor, mean: Tensor) -> Tensor:
    grouped = x.reshape(len(x), mean.shape[1], -1)
    return (grouped - mean[:, :, None]).view_as(x)


def _scaled_sum(matrices: Tensor, scale: Tensor) -> Tensor:
    if len(matrices) > 1 and matrices[0].numel() < _LARGE_SUM:
        return (matrices * scale).sum(0)
    total = matrices[0] * scale[0]
    for matrix, factor in zip(matrices[1:], scale[1:], strict=True):
        total.addcmul_(matrix, factor)
    return total
