"""The matmul backend: batched matrix products, for every device.

A sample (C, *spatial) is seen as (g, M) with M = C / g * P columns. Where the means are small beside the deviations, as
they are in a network, they are subtracted from the results of the products instead of the input:

    Sigma = X X^T / M - mu mu^T,  y = diag(gamma) (W X) + (beta - diag(gamma) W mu)

Otherwise that would cancel digits, and the input is centered first. Operations are few and large: after a convolution
the code of an operation is no longer cached, and each costs at least five microseconds. On a busy machine threads wait
for each other at the end of each.
"""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import torch_private
from ..checks import compute_dtype
from ..solvers.newton import newton_backward as newton_backward
from ..solvers.newton import newton_inverse_sqrt
from .closed_form import InputGradient

newton = newton_inverse_sqrt
#: Each iteration amplifies small eigenvalues by up to 1.5, and with them the digits that the products lose where the
#: variance of one group hides the large mean of another: 1e-4 of the output with 8 iterations, everything with 20
MOST_ITERS = 8
#: elements of x per pass on the CPU: 3 MiB in float32
_PASS = 3 << 18
#: bytes of the largest block that glibc may take from kept memory (DEFAULT_MMAP_THRESHOLD_MAX), less its header
_LARGEST_KEPT = (32 << 20) - (4 << 10)
#: the means of a sample stay in the products while their squared norm is at most this many times its total variance
_LARGEST_MEAN = 4.0


def prepare(x: Tensor) -> Tensor:
    """Return ``x`` in the contiguous memory format."""
    _keep_freed_memory()
    x = x.contiguous()  # torch counts (N, C, 1, 1) with the strides of channels_last as contiguous
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
    fits = a.shape[1] * b.shape[2] * a.element_size() < _LARGEST_KEPT  # a larger result is new memory in each call
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
    return torch.bmm(a, b) if out is None or out.dtype != a.dtype else torch.bmm(a, b, out=out.flatten(2))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a @ b``, possibly in the memory of ``total``."""
    return torch_private.onednn_matmul(a, b, total) if a.dim() == 2 else total.baddbmm_(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched product of matrices."""
    products = [_multiply(*matrices) for matrices in _parts(a, b)]
    return products[0] if products[0].dim() == 3 else torch.stack(products)


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Implement ``Backend.statistics`` by uncentered products."""
    x = _columns(x, groups)
    sigma = _product(x, x.mT)  # first, since it can wait for memory and compute at the same time
    mean = x.mean(2)
    return mean, sigma.baddbmm_(mean[:, :, None], mean[:, None], beta=1 / x.shape[2], alpha=-1)


def large_means(mean: Tensor, variances: Tensor) -> Tensor | None:
    """Implement ``Backend.large_means``."""
    slack = torch.addcmul(variances, mean, mean, value=-1 / _LARGEST_MEAN).sum(1)
    if mean.is_cpu and slack.min().item() >= 0:  # elsewhere the host would wait for the device
        return None
    return mean.masked_fill(slack[:, None] >= 0, 0)


def apply(
    x: Tensor, mean: Tensor, whitening: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Implement ``Backend.apply``."""
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


def grad_products(
    x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Implement ``Backend.grad_products``."""
    if y is not None:
        dy = torch.ops.aten.threshold_backward.grad_input(dy, y, 0, grad_input=out)
    x, dy = _grouped(x, groups).to(mean.dtype), _grouped(dy, groups).to(mean.dtype)
    sums = dy.sum(-1).permute(2, 0, 1)
    along = int(x.shape[2] > len(x))  # one batch per channel or, if there are fewer samples, per sample
    tensors = (
        dy.permute(2, 0, 1, 3),
        x.permute(2, 0, 1, 3),
        sums[..., None],
        mean[:, None].expand(*sums.shape[:2], 1, -1),
    )
    products = [
        _product(grads, columns.mT).baddbmm_(part_sums, part_mean, alpha=-1)
        for grads, columns, part_sums, part_mean in zip(*(tensor.unbind(along) for tensor in tensors), strict=True)
    ]
    return torch.stack(products, along), sums


def apply_backward(
    x: Tensor, mean: Tensor, dy: Tensor, weight: Tensor | None, terms: InputGradient, out: Tensor
) -> None:
    """Implement ``Backend.apply_backward``."""
    groups = mean.shape[1]
    dx, whitening = _grouped(out, groups), terms.whitening
    scale = None if weight is None else _per_channel(weight, mean)
    if scale is not None and dx.shape[2] == 1:
        whitening, scale = whitening * scale.mT, None
    shift = torch.baddbmm(terms.shift[..., None], terms.slope, mean[..., None])[..., None]
    separate = dy.data_ptr() != out.data_ptr()
    parts = _parts(terms.slope, _columns(x, groups), whitening, _grouped(dy, groups), dx, shift)
    for slope, columns, matrix, grad, dx_part, shift_part in parts:
        grad = grad.to(mean.dtype) if scale is None else grad * scale[..., None]
        result = _multiply(matrix, grad.flatten(-2), out=dx_part if separate or scale is not None else None)
        result = _add_product(result, slope, columns)
        torch.sub(result.view_as(dx_part), shift_part, out=dx_part)
