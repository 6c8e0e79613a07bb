"""Group whitening and its backward pass in closed form, composed of the steps that a kernel module offers.

Nothing is kept for the backward pass but the input, its means and covariances. The affine parameters are part of the
products: with :math:`G_j = dY_j X_{C,j}^T` for channel j of every group, both the gradient of the whitening matrix,
:math:`\\sum_j \\mathrm{diag}(\\gamma_j) G_j`, and that of :math:`\\gamma_j`, the row sums of :math:`G_j \\odot W`, come
from the same g x g matrices, so that y is neither kept nor computed again; but a ReLU keeps it, as if it stood alone.

Source: Group Whitening supplement, Algorithms 1-2.
"""

from typing import Protocol

import torch
from torch import Tensor

from ..tensors import compute_dtype


class Kernels(Protocol):
    """The steps on samples (n, C, *spatial) in groups of C / g channels; see ``matmul_kernels``."""

    def prepare(self, x: Tensor) -> Tensor:
        """A tensor as large as the input in the layout that the other functions take."""

    def portion(self, x: Tensor, groups: int) -> int:
        """How many samples the backward pass should work on at a time."""

    def statistics(self, x: Tensor, groups: int) -> tuple[Tensor, Tensor]: ...
    def newton(self, sigma: Tensor, num_iters: int) -> Tensor: ...
    def newton_backward(self, sigma: Tensor, grad: Tensor, num_iters: int) -> tuple[Tensor, Tensor]: ...
    def apply(
        self,
        x: Tensor,
        mean: Tensor,
        whitening: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        relu: bool,
        out: Tensor,
    ) -> None: ...
    def grad_products(
        self, x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def apply_backward(
        self,
        x: Tensor,
        mean: Tensor,
        dy: Tensor,
        whitening: Tensor,
        weight: Tensor | None,
        symmetric: Tensor,
        shift: Tensor,
        out: Tensor,
    ) -> None: ...


def forward(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    num_iters: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y in the dtype of ``x``, the means (N, g) and the covariances with eps (N, g, g)."""
    x = kernels.prepare(x)
    if x.numel() == 0:  # there are no columns to take a mean of
        mean, sigma = (x.new_zeros((len(x), *size), dtype=compute_dtype(x)) for size in ((groups,), (groups, groups)))
        return torch.empty_like(x), mean, sigma
    mean, sigma = kernels.statistics(x, groups)
    sigma.diagonal(dim1=-2, dim2=-1).add_(eps)
    y = torch.empty_like(x)
    kernels.apply(x, mean, kernels.newton(sigma, num_iters), weight, bias, relu, out=y)
    return y, mean, sigma


def backward(
    kernels: Kernels,
    dy: Tensor,
    y: Tensor | None,
    x: Tensor,
    mean: Tensor,
    sigma: Tensor,
    weight: Tensor | None,
    num_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, in its dtype, and of weight and bias, each (C,), in the compute dtype.

    ``y`` is the result of the forward pass if that had a ReLU.
    """
    n, groups = mean.shape
    x, dy, y = kernels.prepare(x), kernels.prepare(dy), None if y is None else kernels.prepare(y)
    if x.numel() == 0:
        return torch.empty_like(x), mean.new_zeros(x.shape[1]), mean.new_zeros(x.shape[1])
    channels = x.shape[1] // groups
    columns = x[0].numel() // groups
    scale = None if weight is None else weight.to(mean.dtype).reshape(groups, channels).mT
    dx = torch.empty_like(x)
    dweight, dbias = mean.new_zeros((channels, groups)), mean.new_zeros((channels, groups))
    portion = kernels.portion(x, groups)
    for start in range(0, n, portion):
        part = slice(start, start + portion)
        x_part, mean_part, dy_part, dx_part = x[part], mean[part], dy[part], dx[part]
        y_part = None if y is None else y[part]
        products, sums = kernels.grad_products(x_part, mean_part, dy_part, groups, y_part, out=dx_part)
        if y is not None:
            dy_part = dx_part  # what the ReLU lets through
        dbias += sums.sum(1)
        grad_whitening = products.sum(0) if scale is None else _scaled_sum(products, scale[:, None, :, None])
        whitening, grad_sigma = kernels.newton_backward(sigma[part], grad_whitening, num_iters)
        dweight += products.mul_(whitening).sum((1, 3))
        if scale is not None:
            sums = sums * scale[:, None]
        shift = (whitening @ (sums.sum(0) / columns)[..., None])[..., 0]
        grad_sigma.mul_(2 / columns)
        kernels.apply_backward(x_part, mean_part, dy_part, whitening, weight, grad_sigma, shift, out=dx_part)
    return dx, dweight.mT.flatten(), dbias.mT.flatten()


def _scaled_sum(matrices: Tensor, scale: Tensor) -> Tensor:
    total = matrices[0] * scale[0]
    for matrix, factor in zip(matrices[1:], scale[1:], strict=True):
        total.addcmul_(matrix, factor)
    return total
