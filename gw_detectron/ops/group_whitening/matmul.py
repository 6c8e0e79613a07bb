r"""The matmul backend: both passes in closed form by batched matrix products, for every device.

A sample (C, *spatial) is seen as (g, M) with M = C / g * P columns. Where the means are small beside
the deviations, as they are in a network, they are subtracted from the results of the products
instead of the input:

    Sigma = X X^T / M - mu mu^T,  y = diag(gamma) (W X) + (beta - diag(gamma) W mu)

Otherwise that would cancel digits, and the input is centered first. Use few, large operations: each
costs at least 5 us after a convolution (cold instruction cache, thread barrier).

Only the input, its means and its covariances are saved for backward, and y if a ReLU is fused, as
nn.ReLU would. With G_j = dY_j X_C,j^T for channel j of each group, the same g x g matrices give the
gradient of the whitening matrix, sum_j diag(gamma_j) G_j, and that of gamma_j, the row sums of
G_j * W. So y is neither saved nor recomputed for them.

Shapes: ``x`` (N, C, *spatial), in g groups of C / g channels; ``mean`` (N, g); ``sigma`` and
``whitening`` (N, g, g); ``weight`` and ``bias`` (C,) or None.

Source: Group Whitening supplement, Algorithms 1-2.
"""

import functools
import math
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .. import torch_private
from ..matrices import diagonal
from ..numerics import autocast_off, compute_dtype, memory_format_of
from ..solvers.newton import newton_backward, newton_inverse_sqrt

#: Each iteration amplifies small eigenvalues by up to 1.5, and with them the digits that the
#: products lose where the variance of one group hides the large mean of another: 1e-4 of the output
#: with 8 iterations, everything with 20
MOST_ITERS = 8
#: elements of x per pass on the CPU: 3 MiB in float32
_PASS = 3 << 18
#: bytes of the largest block that glibc may take from kept memory (DEFAULT_MMAP_THRESHOLD_MAX), less
#: its header
_LARGEST_KEPT = (32 << 20) - (4 << 10)
#: elements of a sum of matrices from which it is faster to add one by one: the products would leave
#: the caches
_LARGE_SUM = 2**17
#: the means of a sample stay in the products while their squared norm is at most this many times its
#: total variance
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
    """Compute the output and the statistics saved for backward, for ``x`` that is not empty.

    Returns:
        y, the means (N, g) and the covariances with eps (N, g, g).
    """
    with autocast_off(x.device.type):
        memory_format = memory_format_of(x)
        x = prepare(x)
        y = torch.empty_like(x)

        saved = []
        for x_part, y_part in _passes(groups, x, y):
            mean, sigma = statistics(x_part, groups)
            variances = diagonal(sigma).add_(eps)

            large = large_means(mean, variances)
            if large is not None:
                x_part = subtract(x_part, large)
                mean, sigma = statistics(x_part, groups)
                diagonal(sigma).add_(eps)

            whitening = newton_inverse_sqrt(sigma, num_iters)
            apply_whitening(x_part, mean, whitening, weight, bias, relu, out=y_part)

            if large is not None:
                mean = large + mean
            saved.append((mean, sigma))

        if len(saved) > 1:
            mean, sigma = map(torch.cat, zip(*saved, strict=True))
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

    Those of weight and bias are (C,), in the compute dtype. ``x`` is not empty. ``y`` is the output of the forward pass
    if a ReLU was fused, else None.
    """
    with autocast_off(x.device.type):
        memory_format = memory_format_of(x)
        x = prepare(x)
        dy = prepare(dy)
        if y is not None:
            y = prepare(y)
        dx = torch.empty_like(x)

        groups = mean.shape[1]
        dweights = []
        dbiases = []
        for tensors in _passes(groups, x, y, dy, dx, mean, sigma):
            dweight, dbias = _backward_of_pass(weight, num_iters, *tensors)
            dweights.append(dweight)
            dbiases.append(dbias)
        dweight = functools.reduce(torch.add, dweights)
        dbias = functools.reduce(torch.add, dbiases)

        dx = dx.contiguous(memory_format=memory_format)
        return dx, dweight.mT.flatten(), dbias.mT.flatten()


def _backward_of_pass(
    weight: Tensor | None,
    num_iters: int,
    x: Tensor,
    y: Tensor | None,
    dy: Tensor,
    dx: Tensor,
    mean: Tensor,
    sigma: Tensor,
) -> tuple[Tensor, Tensor]:
    """Write dX of the samples of a pass; return their gradients of weight and bias, (C / g, g)."""
    groups = mean.shape[1]
    columns = x.numel() // mean.numel()
    large = large_means(mean, diagonal(sigma))
    if large is not None:
        x = subtract(x, large)
        mean = mean - large

    products, sums = grad_products(x, mean, dy, groups, y, out=dx)
    if y is not None:
        dy = dx  # masked by the ReLU
    dbias = sums.sum(1)

    if weight is None:
        grad_whitening = products.sum(0)
    else:
        scale = per_channel(weight, mean).mT[:, None]
        grad_whitening = scaled_sum(products, scale[..., None])
        sums = sums * scale

    whitening, grad_sigma = newton_backward(sigma, grad_whitening, num_iters)
    dweight = products.mul_(whitening).sum((1, 3))

    grad_mean = sums.sum(0) / columns
    shift = whitening @ grad_mean[..., None]
    slope = grad_sigma.mul_(2 / columns)
    apply_backward(x, mean, dy, weight, whitening, slope, shift, out=dx)
    return dweight, dbias


def _passes(
    groups: int, x: Tensor, *others: Tensor | None
) -> Iterable[tuple[Any, ...]]:
    """Split tensors into the samples of each pass."""
    step = samples_per_pass(x, groups)
    if step >= len(x):
        return [(x, *others)]

    parts = [x.split(step)]
    for tensor in others:
        parts.append(repeat(None) if tensor is None else tensor.split(step))
    return zip(*parts, strict=False)


def subtract(x: Tensor, mean: Tensor) -> Tensor:
    n, groups = mean.shape
    grouped = x.reshape(n, groups, -1)
    centered = grouped - mean[:, :, None]
    return centered.view_as(x)


def scaled_sum(matrices: Tensor, scale: Tensor) -> Tensor:
    if len(matrices) > 1 and matrices[0].numel() < _LARGE_SUM:
        return (matrices * scale).sum(0)

    total = matrices[0] * scale[0]
    for matrix, factor in zip(matrices[1:], scale[1:], strict=True):
        total.addcmul_(matrix, factor)
    return total


def prepare(x: Tensor) -> Tensor:
    """Return ``x`` in the contiguous memory format."""
    _keep_freed_memory()
    x = x.contiguous()
    if x.stride(-1) == 1:
        return x
    # torch counts (N, C, 1, 1) with the strides of channels_last as contiguous
    return x.flatten(1).view(x.shape)


@functools.cache
def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory, whose pages need not be zeroed again by the system.

    It keeps twice the size of the largest block that was mapped and freed. The block of this call is
    never touched.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)


def samples_per_pass(x: Tensor, groups: int) -> int:
    """Return the number of samples whose matrices a CPU can cache."""
    if not x.is_cpu:
        return len(x)
    of_sample = math.prod(x.shape[1:])
    of_products = groups * x.shape[1]
    return max(8, _PASS // max(of_sample, of_products))


def _columns(x: Tensor, groups: int) -> Tensor:
    """View contiguous (N, C, *spatial) as (N, g, M), in the compute dtype."""
    columns = x.view(len(x), groups, -1)
    return columns.to(compute_dtype(x))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """View contiguous (N, C, *spatial) as (N, g, C / g, P)."""
    n, channels = x.shape[:2]
    return x.view(n, groups, channels // groups, -1)


def per_channel(parameter: Tensor, mean: Tensor) -> Tensor:
    """Return (C,) as (g, C / g), in the compute dtype."""
    groups = mean.shape[1]
    return parameter.view(groups, -1).to(mean.dtype)


def _uses_onednn(a: Tensor, b: Tensor) -> bool:
    rows, depth = a.shape[1:]
    columns = b.shape[2]
    # a larger result is new memory in each call
    if rows * columns * a.element_size() >= _LARGEST_KEPT:
        return False
    # oneDNN is slow with other strides
    if not (b.is_contiguous() or b.mT.is_contiguous()):
        return False

    shortest = min(rows, depth, columns)
    longest = max(rows, depth, columns)
    return torch_private.onednn_is_faster(a, shortest, longest)


def _parts(a: Tensor, b: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield the operands of one multiplication: matrices of each sample for oneDNN, all samples for bmm."""
    tensors = (a, b, *others)
    if not _uses_onednn(a, b):
        return [tensors]
    return zip(*(tensor.unbind() for tensor in tensors), strict=True)


def _multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply two matrices by oneDNN, or two batches by bmm, which can write to ``out``."""
    if a.dim() == 2:
        return torch_private.onednn_matmul(a, b)
    if out is None or out.dtype != a.dtype:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out=out.flatten(2))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a @ b``, possibly in the memory of ``total``."""
    if a.dim() == 2:
        return torch_private.onednn_matmul(a, b, total)
    return total.baddbmm_(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched product of matrices."""
    if not _uses_onednn(a, b):
        return torch.bmm(a, b)
    return torch.stack(list(map(torch_private.onednn_matmul, a, b)))


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the covariance without eps of each sample, by uncentered products."""
    x = _columns(x, groups)
    # first, since it can wait for memory and compute at the same time
    sigma = _product(x, x.mT)
    mean = x.mean(2)

    # Sigma = X X^T / M - mu mu^T
    sigma.baddbmm_(mean[:, :, None], mean[:, None], beta=1 / x.shape[2], alpha=-1)
    return mean, sigma


def large_means(mean: Tensor, variances: Tensor) -> Tensor | None:
    """Return the means that must be subtracted from x before the products, which would cancel digits.

    ``variances`` is (N, g). The means are zero in samples where none must. None: in no sample.
    """
    slack = torch.addcmul(variances, mean, mean, value=-1 / _LARGEST_MEAN).sum(1)
    # elsewhere the host would wait for the device
    if mean.is_cpu and slack.min().item() >= 0:
        return None
    return mean.masked_fill(slack[:, None] >= 0, 0)


def apply_whitening(
    x: Tensor,
    mean: Tensor,
    whitening: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
    out: Tensor,
) -> None:
    """Write y = weight * (W X) + (bias - weight * W mean) to ``out``, then ReLU if ``relu``."""
    groups = mean.shape[1]
    y = _grouped(out, groups)
    scale = None if weight is None else per_channel(weight, mean)
    if scale is not None and y.shape[2] == 1:
        # a channel per group: the scale is that of a row
        whitening = whitening * scale
        scale = None

    shift = torch.bmm(whitening, mean[..., None])
    if scale is not None:
        shift = shift * scale
    shift = -shift if bias is None else per_channel(bias, mean) - shift

    parts = _parts(whitening, _columns(x, groups), y, shift[..., None])
    for matrix, columns, y_part, shift_part in parts:
        result = _multiply(matrix, columns, out=y_part).view_as(y_part)
        if scale is not None:
            result.mul_(scale[..., None])
        torch.add(result, shift_part, out=y_part)
        if relu:
            y_part.relu_()


def grad_products(
    x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Multiply gradient and input: G_j = dY_j X_j^T - (sums of dY_j) mean^T.

    With ``y``, the output of a fused ReLU, dY is ``dy`` masked to zero where y <= 0, and is stored
    in ``out``.

    Returns:
        The products (C / g, N, g, g), and the sums of dY over positions (C / g, N, g).
    """
    if y is not None:
        dy = torch.ops.aten.threshold_backward.grad_input(dy, y, 0, grad_input=out)
    x = _grouped(x, groups).to(mean.dtype)
    dy = _grouped(dy, groups).to(mean.dtype)
    sums = dy.sum(-1).permute(2, 0, 1)
    channels, samples = sums.shape[:2]
    means = mean[:, None].expand(channels, samples, 1, -1)

    # one batch per channel or, if there are fewer samples, per sample
    along = 1 if channels > samples else 0
    parts = zip(
        dy.permute(2, 0, 1, 3).unbind(along),
        x.permute(2, 0, 1, 3).unbind(along),
        sums[..., None].unbind(along),
        means.unbind(along),
        strict=True,
    )
    products = []
    for grads, columns, part_sums, part_mean in parts:
        product = _product(grads, columns.mT)
        products.append(product.baddbmm_(part_sums, part_mean, alpha=-1))
    return torch.stack(products, along), sums


def apply_backward(
    x: Tensor,
    mean: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    whitening: Tensor,
    slope: Tensor,
    shift: Tensor,
    out: Tensor,
) -> None:
    """Write dX = W (weight * dY) + slope X - (slope mean + shift) to ``out``, which may be ``dy``.

    ``shift`` is (N, g, 1).
    """
    groups = mean.shape[1]
    dx = _grouped(out, groups)
    scale = None if weight is None else per_channel(weight, mean)
    if scale is not None and dx.shape[2] == 1:
        # a channel per group: the scale is that of a column
        whitening = whitening * scale.mT
        scale = None

    shift = torch.baddbmm(shift, slope, mean[..., None])[..., None]
    in_place = dy.data_ptr() == out.data_ptr()

    parts = _parts(
        slope,
        _columns(x, groups),
        whitening,
        _grouped(dy, groups),
        dx,
        shift,
    )
    for slope_part, columns, matrix, grad, dx_part, shift_part in parts:
        if scale is None:
            grad = grad.to(mean.dtype)
            target = None if in_place else dx_part
        else:
            grad = grad * scale[..., None]
            target = dx_part

        result = _multiply(matrix, grad.flatten(-2), out=target)
        result = _add_product(result, slope_part, columns)
        torch.sub(result.view_as(dx_part), shift_part, out=dx_part)
