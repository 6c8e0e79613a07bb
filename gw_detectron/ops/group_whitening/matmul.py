"""The steps of group whitening in batched matrix products, for every device.

A sample is the matrix of :func:`gw_detectron.layers.group_whiten`, seen as (g, C / g, P) with P positions. On the CPU
it is worked on in blocks that fit the last-level cache, and intermediate results live in buffers that are used again:
fresh memory, not arithmetic, is what the textbook form spends most of its time on. Operations are few, since one that
follows a pass over a large map finds none of its code in the cache and takes ten microseconds at the least.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import compat as onednn
from ..tensors import compute_dtype
from .matmul_newton import newton, newton_backward
from .workspace import scratch

#: elements of a block of x on the CPU: 5 MiB in float32, so that three of them stay in the last-level cache
_BLOCK = 5 << 18
__all__ = [
    "apply",
    "apply_backward",
    "grad_products",
    "newton",
    "newton_backward",
    "portion",
    "prepare",
    "statistics",
]


class _Block(NamedTuple):
    samples: slice
    channels: slice  # of a group
    positions: slice

    def of(self, x: Tensor) -> Tensor:
        """The block of an (N, g, C / g, P) tensor; the last two dimensions flatten to a view."""
        return x[self.samples, :, self.channels, self.positions]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(N, C, *spatial) as (N, g, C / g, P); a view of contiguous input."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))


def _blocks(x: Tensor) -> Iterator[_Block]:
    """Cuts (N, g, C / g, P) into blocks whose channels and positions form one range of columns."""
    n, groups, channels, positions = x.shape
    size = _BLOCK if x.device.type == "cpu" else x.numel()
    together = min(n, torch.get_num_threads())  # bmm multiplies samples one beside the other
    step_p = min(positions, max(1, size // (together * groups)))
    step_c = min(channels, max(1, size // (together * groups * positions)))
    step_n = min(n, max(together, size // (groups * channels * positions)))
    for samples in _even(n, step_n):
        for of_group in _even(channels, step_c):
            for of_channel in _even(positions, step_p):
                yield _Block(samples, of_group, of_channel)


def _even(length: int, at_most: int) -> Iterator[slice]:
    """As few slices as do, and as even as can be."""
    if length:
        step = -(-length // -(-length // at_most))
        yield from (slice(start, min(start + step, length)) for start in range(0, length, step))


def prepare(x: Tensor) -> Tensor:
    """A tensor as large as the input in the layout that the other functions take."""
    return x.contiguous()


def portion(x: Tensor, groups: int) -> int:
    """Samples that the backward pass works on at a time: so many that their g x g matrices stay in the cache."""
    if x.device.type != "cpu":
        return x.shape[0]
    return max(8, _BLOCK // max(x[0].numel(), groups * x.shape[1]))


def _one_by_one(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN is to multiply two batches of matrices: they are large, and those of ``b`` dense."""
    sides = (*a.shape[1:], b.shape[2])
    return onednn.suits(a, min(sides), max(sides)) and (b[0].is_contiguous() or b[0].mT.is_contiguous())


def _products(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """``a @ b`` of two batches of matrices: some of the batch at a time, which the next may overwrite."""
    if _one_by_one(a, b):
        for i, matrices in enumerate(zip(a, b, strict=True)):
            yield slice(i, i + 1), onednn.product(*matrices)[None]
    else:
        yield slice(None), torch.bmm(a, b, out=scratch("product", (len(a), a.shape[1], b.shape[2]), a))


def _add_product(total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> None:
    """``total = beta * total + a @ b`` for batches of matrices; with 0, whatever ``total`` was."""
    if not _one_by_one(a, b):
        total.baddbmm_(a, b, beta=beta)
        return
    for some, product in _products(a, b):
        torch.add(product, total[some] if beta else 0, out=total[some])


def statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The mean (N, g) and the covariance without eps (N, g, g) of every sample of (N, C, *spatial)."""
    x = _grouped(x, groups)
    mean = x.new_zeros((x.shape[0], groups), dtype=compute_dtype(x))
    # the matrix is symmetric: a quarter of it need not be multiplied out; oneDNN multiplies all of it in the same time
    half = 0 if onednn.suits(mean, groups, x.shape[2] * x.shape[3]) else groups // 2
    upper = mean.new_zeros((x.shape[0], half, groups))
    corner = mean.new_zeros((x.shape[0], groups - half, groups - half))
    for block in _blocks(x):
        # each block about its own mean, as long as it is in the cache, and the means of the blocks about each other:
        # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979)
        part = block.of(x)
        of_block = part.flatten(2).mean(2, dtype=mean.dtype)
        centred = _centred(part, of_block).flatten(2)
        before, new = block.channels.start * x.shape[3] + block.positions.start, centred.shape[2]
        apart = of_block.sub_(mean[block.samples])
        mean[block.samples].add_(apart, alpha=new / (before + new))
        columns = [centred]
        if before:
            columns.append(apart.mul_((before * new / (before + new)) ** 0.5)[..., None])
        for matrices in columns:
            _add_product(corner[block.samples], matrices[:, half:], matrices[:, half:].mT)
            if half:
                _add_product(upper[block.samples], matrices[:, :half], matrices.mT)
    sigma = corner if half == 0 else torch.cat((upper, torch.cat((upper[:, :, half:].mT, corner), 2)), 1)
    return mean, sigma.div_(x.shape[2] * x.shape[3])


def _centred(part: Tensor, mean: Tensor) -> Tensor:
    return torch.sub(part, mean[:, :, None, None], out=scratch("centred", part.shape, mean))


def apply(
    x: Tensor, mean: Tensor, whitening: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool, out: Tensor
) -> None:
    """Writes ``weight * (whitening @ (x - mean)) + bias``, or its positive part, to ``out``, a contiguous tensor."""
    groups = whitening.shape[-1]
    x, y = _grouped(x, groups), _grouped(out, groups)
    scale, shift = _per_channel(weight, mean), _per_channel(bias, mean)
    for block in _blocks(x):
        centred, of_y = _centred(block.of(x), mean[block.samples]), block.of(y)
        for some, product in _products(whitening[block.samples], centred.flatten(2)):
            result = product.view_as(of_y[some])
            if scale is not None:
                result.mul_(scale[:, block.channels])
            torch.add(result, 0 if shift is None else shift[:, block.channels], out=of_y[some])
        if relu:
            of_y.relu_()


def _per_channel(parameter: Tensor | None, mean: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(mean.dtype).reshape(mean.shape[1], -1, 1)


def grad_products(
    x: Tensor, mean: Tensor, dy: Tensor, groups: int, y: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """``dy_j @ (x_j - mean)^T`` for every channel j of a group, and the sums of ``dy`` over positions.

    With ``y``, the result of a ReLU, of what it lets through of ``dy``, which is written to ``out``; without, ``out``
    is left alone.

    Returns:
        (C / g, N, g, g), overwritten by the next call, and (C / g, N, g).
    """
    x, dy, through = _grouped(x, groups), _grouped(dy, groups), _grouped(out, groups)
    y = None if y is None else _grouped(y, groups)
    n, _, channels, _ = x.shape
    products = scratch("products", (channels, n, groups, groups), mean)
    sums = mean.new_zeros((channels, n, groups))
    for block in _blocks(x):
        centred = _centred(block.of(x), mean[block.samples])
        grad = block.of(dy)
        if y is not None:
            grad = torch.ops.aten.threshold_backward.grad_input(grad, block.of(y), 0, grad_input=block.of(through))
        grad = grad.to(centred.dtype)
        sums[block.channels, block.samples] += grad.sum(-1).permute(2, 0, 1)
        # (C / g, N, g, P) and (C / g, N, g, g): a batch for each channel or, if those are fewer, for each sample
        batches = [grad.permute(2, 0, 1, 3), centred.permute(2, 0, 1, 3), products[block.channels, block.samples]]
        along = int(centred.shape[2] > len(centred))
        for of_grad, of_centred, total in zip(*(batch.unbind(along) for batch in batches), strict=True):
            _add_product(total, of_grad, of_centred.mT, beta=int(block.positions.start > 0))
    return products, sums


def apply_backward(
    x: Tensor,
    mean: Tensor,
    dy: Tensor,
    whitening: Tensor,
    weight: Tensor | None,
    symmetric: Tensor,
    shift: Tensor,
    out: Tensor,
) -> None:
    """Writes ``whitening @ (weight * dy) + symmetric @ (x - mean) - shift`` to ``out`` (or ``dy``), contiguous."""
    groups = whitening.shape[-1]
    x, dy, dx = _grouped(x, groups), _grouped(dy, groups), _grouped(out, groups)
    scale = _per_channel(weight, mean)
    matrices = torch.cat((whitening, symmetric), 2)
    for block in _blocks(x):
        part = block.of(x)
        pair = scratch("pair", (len(part), 2, *part.shape[1:]), mean)
        torch.mul(block.of(dy), 1 if scale is None else scale[:, block.channels], out=pair[:, 0])
        torch.sub(part, mean[block.samples, :, None, None], out=pair[:, 1])
        of_dx, of_shift = block.of(dx), shift[block.samples, :, None, None]
        for some, product in _products(matrices[block.samples], pair.flatten(1, 2).flatten(2)):
            torch.sub(product.view_as(of_dx[some]), of_shift[some], out=of_dx[some])
