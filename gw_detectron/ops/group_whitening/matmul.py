"""The matmul backend: batched matrix products, for every device.

A sample (C, *spatial) is seen as (g, C / g, P) with P positions. On the CPU it is processed in blocks that fit the
last-level cache, and intermediate results live in reused buffers, because the textbook form spends most of its time on
fresh memory, not on arithmetic. Operations are few: after a pass over a large map the code of an operation is no longer
cached, and each costs at least ten microseconds.
"""

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import compat
from ..tensors import compute_dtype
from .closed_form import InputGradient
from .matmul_newton import newton as newton
from .matmul_newton import newton_backward as newton_backward

#: elements of a block of x on the CPU: 5 MiB in float32, so that three blocks stay in the last-level cache
_BLOCK = 5 << 18


class _Workspace(threading.local):
    """Buffers that a thread reuses; fresh memory costs more than arithmetic."""

    def __init__(self) -> None:
        self.reserved: _Buffers = {}
        self.idle: _Buffers = {}

    def buffer(self, name: str, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Return uninitialized memory, valid until the next call with this name."""
        if like.device.type != "cpu":  # other devices have a caching allocator
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        size, buffers = math.prod(shape), self.reserved
        key = (name, like.dtype)
        if key not in buffers or buffers[key].numel() < size:
            with torch.inference_mode(False):  # an inference tensor could not be used in training later
                buffers[key] = torch.empty(size, dtype=like.dtype)
        return buffers[key][:size].view(shape)


_Buffers = dict[tuple[str, torch.dtype], Tensor]
_workspace = _Workspace()


@contextlib.contextmanager
def reserve_buffers() -> Iterator[None]:
    """Reserve this thread's buffers for one pass.

    A signal handler, profiler or hook may run another pass inside of it, in the same thread. That pass finds no idle
    buffers and makes its own.
    """
    outer = _workspace.reserved
    _workspace.idle, _workspace.reserved = {}, _workspace.idle
    try:
        yield
    finally:
        _workspace.idle, _workspace.reserved = _workspace.reserved, outer


class _Block(NamedTuple):
    samples: slice
    channels: slice  # of a group
    positions: slice

    def of(self, x: Tensor) -> Tensor:
        """Return this block of ``x``, (N, g, C/g, P).

        The last two dimensions of the block flatten to a view.
        """
        return x[self.samples, :, self.channels, self.positions]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """View contiguous (N, C, *spatial) as (N, g, C/g, P)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))


def _blocks(x: Tensor) -> Iterator[_Block]:
    """Split (N, g, C/g, P) into blocks of contiguous columns."""
    n, groups, channels, positions = x.shape
    size = _BLOCK if x.device.type == "cpu" else x.numel()
    parallel = min(n, torch.get_num_threads())  # bmm multiplies this many samples at the same time
    step_p = min(positions, max(1, size // (parallel * groups)))
    step_c = min(channels, max(1, size // (parallel * groups * positions)))
    step_n = min(n, max(parallel, size // (groups * channels * positions)))
    for samples in _even_slices(n, step_n):
        for group_channels in _even_slices(channels, step_c):
            for positions_slice in _even_slices(positions, step_p):
                yield _Block(samples, group_channels, positions_slice)


def _even_slices(length: int, max_size: int) -> Iterator[slice]:
    """Split a range into few slices of nearly equal, limited length."""
    if length:
        step = -(-length // -(-length // max_size))
        yield from (slice(start, min(start + step, length)) for start in range(0, length, step))


def prepare(x: Tensor) -> Tensor:
    """Return ``x`` in the contiguous memory format."""
    return x.contiguous()


def samples_per_pass(x: Tensor, groups: int) -> int:
    """Return the number of samples whose matrices a CPU can cache."""
    if x.device.type != "cpu":
        return x.shape[0]
    return max(8, _BLOCK // max(x[0].numel(), groups * x.shape[1]))


def _use_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN multiplies two batches of matrices faster."""
    sides = (*a.shape[1:], b.shape[2])
    return compat.onednn_is_faster(a, min(sides), max(sides)) and (b[0].is_contiguous() or b[0].mT.is_contiguous())


def _products(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the batched ``a @ b`` in parts.

    Each part is valid until the next one.
    """
    if _use_onednn(a, b):
        for i, matrices in enumerate(zip(a, b, strict=True)):
            yield slice(i, i + 1), compat.onednn_matmul(*matrices)[None]
    else:
        yield slice(None), torch.bmm(a, b, out=_workspace.buffer("product", (len(a), a.shape[1], b.shape[2]), a))


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
    """Add a batched matrix product in place.

    ``total = beta * total + a @ b``; beta=0 ignores the old value.
    """
    if not _use_onednn(a, b):
        total.baddbmm_(a, b, beta=beta)
        return
    for samples, product in _products(a, b):
        torch.add(product, total[samples] if beta else 0, out=total[samples])


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Implement ``Backend.statistics``, one cached block at a time."""
    x = _grouped(x, groups)
    mean = x.new_zeros((x.shape[0], groups), dtype=compute_dtype(x))
    # by symmetry a quarter of the matrix need not be computed; oneDNN computes all of it in the same time
    half = 0 if compat.onednn_is_faster(mean, groups, x.shape[2] * x.shape[3]) else groups // 2
    upper = mean.new_zeros((x.shape[0], half, groups))
    corner = mean.new_zeros((x.shape[0], groups - half, groups - half))
    for block in _blocks(x):
        # second moments about the block's own mean while the block is cached, then a rank-1 update for the means:
        # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979)
        part = block.of(x)
        block_mean = part.flatten(2).mean(2, dtype=mean.dtype)
        centered = _centered(part, block_mean).flatten(2)
        before, new = block.channels.start * x.shape[3] + block.positions.start, centered.shape[2]
        mean_difference = block_mean.sub_(mean[block.samples])
        mean[block.samples].add_(mean_difference, alpha=new / (before + new))
        columns = [centered]
        if before:
            columns.append(mean_difference.mul_((before * new / (before + new)) ** 0.5)[..., None])
        for matrices in columns:
            _add_product(corner[block.samples], matrices[:, half:], matrices[:, half:].mT)
            if half:
                _add_product(upper[block.samples], matrices[:, :half], matrices.mT)
    sigma = corner if half == 0 else torch.cat((upper, torch.cat((upper[:, :, half:].mT, corner), 2)), 1)
    return mean, sigma.div_(x.shape[2] * x.shape[3])


def _centered(part: Tensor, mean: Tensor) -> Tensor:
    return torch.sub(part, mean[:, :, None, None], out=_workspace.buffer("centered", part.shape, mean))


def apply(
    x: Tensor, mean: Tensor, whitening: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Implement ``Backend.apply``."""
    groups = whitening.shape[-1]
    x, y = _grouped(x, groups), _grouped(out, groups)
    scale, shift = _per_channel(weight, mean), _per_channel(bias, mean)
    for block in _blocks(x):
        centered, y_block = _centered(block.of(x), mean[block.samples]), block.of(y)
        for samples, product in _products(whitening[block.samples], centered.flatten(2)):
            result = product.view_as(y_block[samples])
            if scale is not None:
                result.mul_(scale[:, block.channels])
            torch.add(result, 0 if shift is None else shift[:, block.channels], out=y_block[samples])
        if relu:
            y_block.relu_()


def _per_channel(parameter: Tensor | None, mean: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(mean.dtype).reshape(mean.shape[1], -1, 1)


def grad_products(
    x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Implement ``Backend.grad_products``."""
    x, dy, masked = _grouped(x, groups), _grouped(dy, groups), _grouped(out, groups)
    y = None if y is None else _grouped(y, groups)
    n, _, channels, _ = x.shape
    products = _workspace.buffer("products", (channels, n, groups, groups), mean)
    sums = mean.new_zeros((channels, n, groups))
    for block in _blocks(x):
        centered = _centered(block.of(x), mean[block.samples])
        grad = block.of(dy)
        if y is not None:
            grad = torch.ops.aten.threshold_backward.grad_input(grad, block.of(y), 0, grad_input=block.of(masked))
        grad = grad.to(centered.dtype)
        sums[block.channels, block.samples] += grad.sum(-1).permute(2, 0, 1)
        # (C / g, N, g, P) and (C / g, N, g, g): one batch per channel or, if there are fewer samples, per sample
        batches = [grad.permute(2, 0, 1, 3), centered.permute(2, 0, 1, 3), products[block.channels, block.samples]]
        along = int(centered.shape[2] > len(centered))
        for grad_block, centered_block, total in zip(*(batch.unbind(along) for batch in batches), strict=True):
            _add_product(total, grad_block, centered_block.mT, beta=int(block.positions.start > 0))
    return products, sums


def apply_backward(
    x: Tensor, mean: Tensor, dy: Tensor, weight: Tensor | None, terms: InputGradient, out: Tensor
) -> None:
    """Implement ``Backend.apply_backward``, both products as one."""
    groups = mean.shape[1]
    x, dy, dx = _grouped(x, groups), _grouped(dy, groups), _grouped(out, groups)
    scale = _per_channel(weight, mean)
    matrices = torch.cat((terms.whitening, terms.slope), 2)
    for block in _blocks(x):
        part = block.of(x)
        pair = _workspace.buffer("pair", (len(part), 2, *part.shape[1:]), mean)
        torch.mul(block.of(dy), 1 if scale is None else scale[:, block.channels], out=pair[:, 0])
        torch.sub(part, mean[block.samples, :, None, None], out=pair[:, 1])
        dx_block, shift_block = block.of(dx), terms.shift[block.samples, :, None, None]
        for samples, product in _products(matrices[block.samples], pair.flatten(1, 2).flatten(2)):
            torch.sub(product.view_as(dx_block[samples]), shift_block[samples], out=dx_block[samples])
