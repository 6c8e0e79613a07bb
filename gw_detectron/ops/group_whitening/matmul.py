r"""The matmul backend: forward and backward pass in closed form by batched matrix products, for every device.

A sample (C, *spatial) is seen as (g, M) with M = C / g * P columns. Where the means are small beside the deviations, as
they are in a network, they are subtracted from the results of the products instead of the input:

    Sigma = X X^T / M - mu mu^T,  y = diag(gamma) (W X) + (beta - diag(gamma) W mu)

Otherwise that would cancel digits, and the input is centered first. Use few, large operations: each costs at least 5 us
after a convolution (cold instruction cache, thread barrier).

Only the input, its means and its covariances are saved for backward, and y if a ReLU is fused, as nn.ReLU would. With
G_j = dY_j X_C,j^T for channel j of each group, the same g x g matrices give the gradient of the whitening matrix,
sum_j diag(gamma_j) G_j, and that of gamma_j, the row sums of G_j * W. So y is neither saved nor recomputed for them.

Shapes: ``x`` (N, C, *spatial), in g groups of C / g channels; ``mean`` (N, g); ``sigma`` and ``whitening`` (N, g, g);
``weight`` and ``bias`` (C,) or None.

Source: Group Whitening supplement, Algorithms 1-2.
"""

import functools
import math
from collections.abc import Iterable
from functools import reduce
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..checks import autocast_off, compute_dtype, memory_format_of
from ..solvers.newton import newton_backward, newton_inverse_sqrt

#: Each iteration amplifies small eigenvalues by up to 1.5, and with them the digits that the products lose where the
#: variance of one group hides the large mean of another: 1e-4 of the output with 8 iterations, everything with 20
MOST_ITERS = 8
#: elements of x per pass on the CPU: 3 MiB in float32
_PASS = 3 << 18
#: bytes of the largest block that glibc may take from kept memory (DEFAULT_MMAP_THRESHOLD_MAX), less its header
_LARGEST_KEPT = (32 << 20) - (4 << 10)
#: elements of a sum of matrices from which it is faster to add one by one: the products would leave the caches
_LARGE_SUM = 2**17
#: the means of a sample stay in the products while their squared norm is at most this many times its total variance
_LARGEST_MEAN = 4.0


def forward(
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
        memory_format, x = memory_format_of(x), _prepare(x)
        if x.numel() == 0:  # there is no column to average
            mean = x.new_zeros((len(x), groups), dtype=compute_dtype(x))
            return torch.empty_like(x), mean, mean.new_zeros((len(x), groups, groups))
        y, saved = torch.empty_like(x), []
        for x_part, y_part in _passes(groups, x, y):
            mean, sigma = statistics(x_part, groups)
            large = large_means(mean, sigma.diagonal(dim1=1, dim2=2).add_(eps))
            if large is not None:
                x_part = _subtract(x_part, large)
                mean, sigma = statistics(x_part, groups)
                sigma.diagonal(dim1=1, dim2=2).add_(eps)
            _apply(
                x_part,
                mean,
                newton_inverse_sqrt(sigma, num_iters),
                weight,
                bias,
                relu,
                out=y_part,
            )
            saved.append((mean if large is None else large + mean, sigma))
        mean, sigma = saved[0] if len(saved) == 1 else map(torch.cat, zip(*saved, strict=True))
        return y.contiguous(memory_format=memory_format), mean, sigma


def backward(
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
        x, dy, y = _prepare(x), _prepare(dy), None if y is None else _prepare(y)
        if x.numel() == 0:
            return torch.empty_like(x), mean.new_zeros(x.shape[1]), mean.new_zeros(x.shape[1])
        channels = x.shape[1] // groups
        columns = x.numel() // (len(x) * groups)
        scale = None if weight is None else weight.to(mean.dtype).reshape(groups, channels).mT
        dx = torch.empty_like(x)
        dweights, dbiases = [], []
        for x_part, y_part, dy_part, dx_part, mean_part, sigma_part in _passes(
            groups, x, y, dy, dx, mean, sigma
        ):
            large = large_means(mean_part, sigma_part.diagonal(dim1=1, dim2=2))
            if large is not None:
                x_part, mean_part = _subtract(x_part, large), mean_part - large
            products, sums = _grad_products(
                x_part, mean_part, dy_part, groups, y_part, out=dx_part
            )
            if y is not None:
                dy_part = dx_part  # masked by the ReLU
            dbiases.append(sums.sum(1))
            grad_whitening = (
                products.sum(0)
                if scale is None
                else _scaled_sum(products, scale[:, None, :, None])
            )
            whitening, grad_sigma = newton_backward(sigma_part, grad_whitening, num_iters)
            dweights.append(products.mul_(whitening).sum((1, 3)))
            if scale is not None:
                sums = sums * scale[:, None]
            shift = (whitening @ (sums.sum(0) / columns)[..., None])[..., 0]
            slope = grad_sigma.mul_(2 / columns)
            _apply_backward(
                x_part, mean_part, dy_part, weight, whitening, slope, shift, out=dx_part
            )
        dweight, dbias = (reduce(torch.add, parts) for parts in (dweights, dbiases))
        return (
            dx.contiguous(memory_format=memory_format),
            dweight.mT.flatten(),
            dbias.mT.flatten(),
        )


def _passes(groups: int, x: Tensor, *others: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """Split tensors into the samples of each pass."""
    step = samples_per_pass(x, groups)
    if step >= len(x):
        return [(x, *others)]
    return zip(
        *(repeat(None) if tensor is None else tensor.split(step) for tensor in (x, *others)),
        strict=False,
    )


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


def _prepare(x: Tensor) -> Tensor:
    """Return ``x`` in the contiguous memory format."""
    _keep_freed_memory()
    x = (
        x.contiguous()
    )  # torch counts (N, C, 1, 1) with the strides of channels_last as contiguous
    return x if x.stride(-1) == 1 else x.flatten(1).view(x.shape)


@functools.cache
def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory, whose pages need not be zeroed again by the system.

    It keeps twice the size of the largest block that was mapped and freed. The block of this call is never touched.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


def samples_per_pass(x: Tensor, groups: int) -> int:
    """Return the number of samples whose matrices a CPU can cache."""
    if not x.is_cpu:
        return x.shape[0]
    return max(8, _PASS // max(math.prod(x.shape[1:]), groups * x.shape[1]))


def _columns(x: Tensor, groups: int) -> Tensor:
    """View contiguous (N, C, *spatial) as (N, g, M), in the compute dtype."""
    return x.view(x.shape[0], groups, -1).to(compute_dtype(x))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """View contiguous (N, C, *spatial) as (N, g, C / g, P)."""
    return x.view(x.shape[0], groups, x.shape[1] // groups, -1)


def _per_channel(parameter: Tensor, mean: Tensor) -> Tensor:
    """Return (C,) as (g, C / g), in the compute dtype."""
    return parameter.view(mean.shape[1], -1).to(mean.dtype)


def _uses_onednn(a: Tensor, b: Tensor) -> bool:
    sides = (*a.shape[1:], b.shape[2])
    fits = (
        a.shape[1] * b.shape[2] * a.element_size() < _LARGEST_KEPT
    )  # a larger result is new memory in each call
    contiguous = b.is_contiguous() or b.mT.is_contiguous()  # oneDNN is slow with other strides
    return fits and contiguous and torch_private.onednn_is_faster(a, min(sides), max(sides))


def _parts(a: Tensor, b: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield the operands of one multiplication: matrices of each sample for oneDNN, all samples for bmm."""
    if not _uses_onednn(a, b):
        return [(a, b, *others)]
    return zip(*(tensor.unbind() for tensor in (a, b, *others)), strict=True)


def _multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply two matrices by oneDNN, or two batches by bmm, which can write to ``out``."""
    if a.dim() == 2:
        return torch_private.onednn_matmul(a, b)
    return (
        torch.bmm(a, b)
        if out is None or out.dtype != a.dtype
        else torch.bmm(a, b, out=out.flatten(2))
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a @ b``, possibly in the memory of ``total``."""
    return torch_private.onednn_matmul(a, b, total) if a.dim() == 2 else total.baddbmm_(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched product of matrices."""
    products = [_multiply(*matrices) for matrices in _parts(a, b)]
    return products[0] if products[0].dim() == 3 else torch.stack(products)


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the covariance without eps of each sample, by uncentered products."""
    x = _columns(x, groups)
    sigma = _product(
        x, x.mT
    )  # first, since it can wait for memory and compute at the same time
    mean = x.mean(2)
    return mean, sigma.baddbmm_(mean[:, :, None], mean[:, None], beta=1 / x.shape[2], alpha=-1)


def large_means(mean: Tensor, variances: Tensor) -> Tensor | None:
    """Return the means that must be subtracted from x before the products, which would cancel digits.

    ``variances`` is (N, g). The means are zero in samples where none must. None: in no sample.
    """
    slack = torch.addcmul(variances, mean, mean, value=-1 / _LARGEST_MEAN).sum(1)
    if mean.is_cpu and slack.min().item() >= 0:  # elsewhere the host would wait for the device
        return None
    return mean.masked_fill(slack[:, None] >= 0, 0)


def _apply(
    x: Tensor,
    mean: Tensor,
    whitening: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    out: Tensor,
) -> None:
    """Write y = weight * (W (x - mean)) + bias to ``out``, then ReLU if ``relu``."""
    groups = mean.shape[1]
    y, scale = _grouped(out, groups), None if weight is None else _per_channel(weight, mean)
    if scale is not None and y.shape[2] == 1:  # a channel per group: the scale is that of a row
        whitening, scale = whitening * scale, None
    shift = torch.bmm(whitening, mean[..., None])
    if scale is not None:
        shift = shift * scale
    shift = (-shift if bias is None else _per_channel(bias, mean) - shift)[..., None]
    for matrix, columns, y_part, shift_part in _parts(whitening, _columns(x, groups), y, shift):
        result = _multiply(matrix, columns, out=y_part).view_as(y_part)
        if scale is not None:
            result.mul_(scale[..., None])
        torch.add(result, shift_part, out=y_part)
        if relu:
            y_part.relu_()


def _grad_products(
    x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the products G_j (C / g, N, g, g) of gradient and input, and the sums of dY over positions (C / g, N, g).

    With ``y``, the output of a fused ReLU, dY is ``dy`` masked to zero where y <= 0, and is stored in ``out``.
    """
    if y is not None:
        dy = torch.ops.aten.threshold_backward.grad_input(dy, y, 0, grad_input=out)
    x, dy = _grouped(x, groups).to(mean.dtype), _grouped(dy, groups).to(mean.dtype)
    sums = dy.sum(-1).permute(2, 0, 1)
    along = int(
        x.shape[2] > len(x)
    )  # one batch per channel or, if there are fewer samples, per sample
    means = mean[:, None].expand(*sums.shape[:2], 1, -1)
    tensors = dy.permute(2, 0, 1, 3), x.permute(2, 0, 1, 3), sums[..., None], means
    products = [
        _product(grads, columns.mT).baddbmm_(part_sums, part_mean, alpha=-1)
        for grads, columns, part_sums, part_mean in zip(
            *(tensor.unbind(along) for tensor in tensors), strict=True
        )
    ]
    return torch.stack(products, along), sums


def _apply_backward(
    x: Tensor,
    mean: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    whitening: Tensor,
    slope: Tensor,
    shift: Tensor,
    out: Tensor,
) -> None:
    """Write dX = W (weight * dY) + slope (X - mean) - shift to ``out``, which may be ``dy``."""
    groups = mean.shape[1]
    dx = _grouped(out, groups)
    scale = None if weight is None else _per_channel(weight, mean)
    if scale is not None and dx.shape[2] == 1:
        whitening, scale = whitening * scale.mT, None
    shift = torch.baddbmm(shift[..., None], slope, mean[..., None])[..., None]
    separate = dy.data_ptr() != out.data_ptr()
    parts = _parts(slope, _columns(x, groups), whitening, _grouped(dy, groups), dx, shift)
    for slope_part, columns, matrix, grad, dx_part, shift_part in parts:
        grad = grad.to(mean.dtype) if scale is None else grad * scale[..., None]
        result = _multiply(
            matrix, grad.flatten(-2), out=dx_part if separate or scale is not None else None
        )
        result = _add_product(result, slope_part, columns)
        torch.sub(result.view_as(dx_part), shift_part, out=dx_part)
