"""Backward pass: products of gradient and input, their sums over splits, then the gradients."""

from __future__ import (
    annotations,  # without triton, constexpr is only a name in the signatures
)

import torch
from torch import Tensor

from ...numerics import autocast_off, zero_variance_threshold
from ...solvers.newton import newton_backward
from . import plans
from .compiler import constexpr, jit, tl, triton
from .device_functions import (
    half_scale,
    input_scale,
    load_matrix,
    load_per_channel,
    load_rows,
    multiply_half,
    sample_ptr,
    split_half,
    split_matrix,
    store_matrix,
    tile_columns,
    tile_offsets,
    to_operand,
)
from .newton import covariance_gradient
from .support import in_halves, operand_dtype
from .tiling import over_columns, padded_rows, tuning_for


@jit
def _products(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, y_ptr, masked_ptr, masked_n, masked_outer,
    mean_ptr, weight_ptr, part_ptr, largest_ptr, samples, positions, tiles, per_split,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, MASKED_J: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute products and sums for one j and one split of positions.

    The product is dY_j (X_j - mean)^T, the sums are those of the rows of dY_j. If y_ptr is given,
    dY is zeroed where y <= 0, and the masked gradient is stored. If largest_ptr is given, so is the
    largest |weight * dY|.
    """
    j = tl.program_id(0) // samples
    n = tl.program_id(0) % samples
    first = tl.program_id(1) * per_split
    if CPG == 1:  # tells the compiler that j is 0, as in tile_columns
        j *= 0

    x_ptr = sample_ptr(x_ptr, n, x_n, VECTOR)
    dy_ptr = sample_ptr(dy_ptr, n, dy_n, VECTOR)
    if y_ptr is not None:
        y_ptr = sample_ptr(y_ptr, n, masked_n, VECTOR)
        masked_ptr = sample_ptr(masked_ptr, n, masked_n, VECTOR)

    rows = tl.arange(0, ROWS)
    mean = load_rows(mean_ptr, n, rows, GROUPS)
    total = tl.zeros([ROWS, PB], tl.float32)
    product = tl.zeros([ROWS, ROWS], tl.float32)
    if largest_ptr is not None:
        largest = tl.zeros([ROWS, PB], tl.float32)

    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        _, p, exists = tile_columns(tile, positions, 1, JB, PB, VECTOR, X_J)
        inside = (rows < GROUPS)[:, None] & exists[None, :]
        x = tl.load(
            x_ptr + tile_offsets(rows, j, p, x_outer, CPG, VECTOR, X_J),
            mask=inside,
            other=0.0,
        )
        dy = tl.load(
            dy_ptr + tile_offsets(rows, j, p, dy_outer, CPG, VECTOR, DY_J),
            mask=inside,
            other=0.0,
        )
        if y_ptr is not None:
            masked = tile_offsets(rows, j, p, masked_outer, CPG, VECTOR, MASKED_J)
            y = tl.load(y_ptr + masked, mask=inside, other=0.0)
            # not y > 0: where y is NaN, torch's ReLU passes the gradient on
            dy = tl.where(y <= 0, 0.0, dy)
            tl.store(masked_ptr + masked, dy, mask=inside)

        dy = dy.to(tl.float32)
        centered = to_operand(x.to(tl.float32) - mean[:, None], OPERAND, PRECISION)
        product = tl.dot(
            to_operand(dy, OPERAND, PRECISION),
            tl.trans(centered),
            product,
            input_precision=PRECISION,
        )
        total += dy
        if largest_ptr is not None:
            largest = tl.maximum(largest, tl.abs(dy))

    part = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    store_matrix(part_ptr, part, rows, rows, product, GROUPS, 1)
    sums = part * (GROUPS * (GROUPS + 1)) + GROUPS * GROUPS + rows
    tl.store(part_ptr + sums, tl.sum(total, 1), mask=rows < GROUPS)

    if largest_ptr is not None:
        row = tl.max(largest, 1)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + rows * CPG + j, mask=rows < GROUPS, other=0.0)
            row *= tl.abs(weight.to(tl.float32))
        tl.store(largest_ptr + part, tl.max(row, 0))


@jit
def _reduce(
    part_ptr, part_largest_ptr, product_ptr, weight_ptr, grad_ptr, largest_ptr, samples, splits,
    GROUPS: constexpr, CPG: constexpr, JB: constexpr, AT_ONCE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Add the splits of a sample, for BLOCK elements of its matrices, and its channels.

    Channels are scaled by their weights. The sums of the splits are stored if product_ptr is given;
    else they stand where they are. The largest values of the splits are merged, too, if they are
    given.
    """
    n = tl.program_id(0).to(tl.int64)
    SIZE: constexpr = GROUPS * (GROUPS + 1)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = element < SIZE
    row = tl.where(
        element < GROUPS * GROUPS, element // GROUPS, element - GROUPS * GROUPS
    )
    total = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([JB, AT_ONCE], tl.float32)

    for start_j in tl.range(0, CPG, JB):
        j = start_j + tl.arange(0, JB)
        sample = j * samples + n
        stored = (j < CPG)[:, None] & exists[None, :]
        products = tl.zeros([JB, BLOCK], tl.float32)

        for start in tl.range(0, splits, AT_ONCE):
            s = start + tl.arange(0, AT_ONCE)
            part = sample[:, None] * splits + s[None, :]
            inside = (j < CPG)[:, None] & (s < splits)[None, :]
            at = part[:, :, None] * SIZE + element[None, None, :]
            loaded = inside[:, :, None] & exists[None, None, :]
            products += tl.sum(tl.load(part_ptr + at, mask=loaded, other=0.0), 1)
            if largest_ptr is not None:
                part_largest = tl.load(part_largest_ptr + part, mask=inside, other=0.0)
                largest = tl.maximum(largest, part_largest)

        if product_ptr is not None:
            at = sample[:, None] * SIZE + element[None, :]
            tl.store(product_ptr + at, products, mask=stored)
        if weight_ptr is not None:
            at = row[None, :] * CPG + j[:, None]
            weight = tl.load(weight_ptr + at, mask=stored, other=0.0)
            products *= weight.to(tl.float32)
        total += tl.sum(products, 0)

    tl.store(grad_ptr + n * SIZE + element, total, mask=exists)
    if largest_ptr is not None:
        tl.store(
            largest_ptr + n, tl.max(tl.max(largest, 1), 0), mask=tl.program_id(1) == 0
        )


@jit
def _matrix_gradients(
    product_ptr, whitening_ptr, dweight_ptr, dbias_ptr, sigma_ptr, kept_ptr, grad_ptr, grad_sigma_ptr,
    zero, samples, cpg, GROUPS: constexpr, ROWS: constexpr, AT_ONCE: constexpr, ITERS: constexpr,
):  # fmt: skip
    """Compute dL/dSigma of one sample, or the gradients of weight and bias of one channel.

    The former if kept_ptr is given. The latter are row sums of G_j * W, and sums of dY.
    """
    channel = tl.program_id(0)
    if kept_ptr is not None:
        if channel < samples:
            n = samples - 1 - channel  # what was kept last is still in the caches
            covariance_gradient(
                sigma_ptr, whitening_ptr, kept_ptr, grad_ptr, grad_sigma_ptr, n, zero, GROUPS, ROWS, ITERS,
            )  # fmt: skip
        channel -= samples

    if channel >= 0:
        SIZE: constexpr = GROUPS * (GROUPS + 1)
        row = channel // cpg
        j = channel % cpg
        rows = tl.arange(0, ROWS)
        products = tl.zeros([AT_ONCE, ROWS], tl.float32)
        sums = tl.zeros([AT_ONCE], tl.float32)
        product_ptr += (j * samples).to(tl.int64) * SIZE

        for start in tl.range(0, samples, AT_ONCE, num_stages=3):
            n = (start + tl.arange(0, AT_ONCE)).to(tl.int64)
            inside = (n < samples)[:, None] & (rows < GROUPS)[None, :]
            at = row * GROUPS + rows[None, :]
            product = tl.load(
                product_ptr + n[:, None] * SIZE + at, mask=inside, other=0.0
            )
            whitening = tl.load(
                whitening_ptr + n[:, None] * (GROUPS * GROUPS) + at,
                mask=inside,
                other=0.0,
            )
            products += product * whitening
            sums += tl.load(
                product_ptr + n * SIZE + GROUPS * GROUPS + row,
                mask=n < samples,
                other=0.0,
            )

        tl.store(dweight_ptr + channel, tl.sum(tl.sum(products, 1), 0))
        tl.store(dbias_ptr + channel, tl.sum(sums, 0))


@jit
def _apply_backward(
    x_ptr, x_n, x_outer, dy_ptr, dy_n, dy_outer, dx_ptr, dx_n, dx_outer,
    mean_ptr, sigma_ptr, whitening_ptr, weight_ptr, grad_sigma_ptr, grad_ptr, largest_ptr,
    positions, tiles, per_split, columns,
    GROUPS: constexpr, ROWS: constexpr, CPG: constexpr, JB: constexpr, PB: constexpr, VECTOR: constexpr,
    X_J: constexpr, DY_J: constexpr, DX_J: constexpr, IN_PLACE: constexpr,
    DEPTH: constexpr, HALVES: constexpr, OPERAND: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute dx for one split of the columns; DEPTH and HALVES as in _apply.

    dx = W (weight * dy - grad_mean / M) + 2 / M dL/dSigma (x - mean).
    """
    n = tl.program_id(0)
    first = tl.program_id(1) * per_split
    # to the sums of weight * dy
    grad_ptr += n.to(tl.int64) * (GROUPS * (GROUPS + 1)) + GROUPS * GROUPS
    x_ptr = sample_ptr(x_ptr, n, x_n, VECTOR)
    dy_ptr = sample_ptr(dy_ptr, n, dy_n, VECTOR)
    dx_ptr = sample_ptr(dx_ptr, n, dx_n, VECTOR)
    rows = tl.arange(0, ROWS)

    if DEPTH == ROWS:
        mean = load_rows(mean_ptr, n, rows, GROUPS)
        grad_mean = tl.load(grad_ptr + rows, mask=rows < GROUPS, other=0.0) / columns
        whitening = load_matrix(whitening_ptr, n, rows, rows, GROUPS)
        slope = load_matrix(grad_sigma_ptr, n, rows, rows, GROUPS) * (2 / columns)
        if HALVES:
            whitening_high, whitening_low, inverse = split_matrix(whitening)
            slope_high, slope_low, inverse_slope = split_matrix(slope)
            # |grad_mean| / M is not larger
            scale, inverse_dy = half_scale(2 * tl.load(largest_ptr + n))
            scale_x, inverse_x = input_scale(sigma_ptr, n, rows, columns, GROUPS)
            inverse *= inverse_dy
            inverse_slope *= inverse_x
        else:
            whitening = to_operand(whitening, OPERAND, PRECISION)
            slope = to_operand(slope, OPERAND, PRECISION)
        # the same for all tiles: else copied to shared memory for each
        if weight_ptr is not None and JB >= CPG:
            j, _, _ = tile_columns(first, positions, CPG, JB, PB, VECTOR, X_J)
            weight = load_per_channel(weight_ptr, rows, j, GROUPS, CPG, JB)

    for tile in tl.range(first, tl.minimum(first + per_split, tiles)):
        j, p, exists = tile_columns(tile, positions, CPG, JB, PB, VECTOR, X_J)
        dx = tl.zeros([ROWS, JB * PB], tl.float32)
        # two products do not share an accumulator in a loop: see triton-lang/triton#10821
        of_statistics = tl.zeros([ROWS, JB * PB], tl.float32)
        # a single iteration if the matrices are kept
        for depth in tl.range(0, ROWS, DEPTH):
            k = depth + tl.arange(0, DEPTH)
            if DEPTH != ROWS:
                mean = load_rows(mean_ptr, n, k, GROUPS)
                grad_mean = tl.load(grad_ptr + k, mask=k < GROUPS, other=0.0) / columns
                whitening = to_operand(
                    load_matrix(whitening_ptr, n, rows, k, GROUPS), OPERAND, PRECISION
                )
                slope = load_matrix(grad_sigma_ptr, n, rows, k, GROUPS) * (2 / columns)
                slope = to_operand(slope, OPERAND, PRECISION)

            inside = (k < GROUPS)[:, None] & exists[None, :]
            x = tl.load(
                x_ptr + tile_offsets(k, j, p, x_outer, CPG, VECTOR, X_J),
                mask=inside,
                other=0.0,
            )
            dy = tl.load(
                dy_ptr + tile_offsets(k, j, p, dy_outer, CPG, VECTOR, DY_J),
                mask=inside,
                other=0.0,
            )

            scaled = dy.to(tl.float32)
            if weight_ptr is not None:
                if DEPTH != ROWS or JB < CPG:
                    weight = load_per_channel(weight_ptr, k, j, GROUPS, CPG, JB)
                scaled *= weight
            scaled -= grad_mean[:, None]
            centered = x.to(tl.float32) - mean[:, None]

            if HALVES:
                high, low = split_half(scaled * scale)
                dx = multiply_half(whitening_high, whitening_low, high, low) * inverse
                high, low = split_half(centered * scale_x)
                of_statistics = (
                    multiply_half(slope_high, slope_low, high, low) * inverse_slope
                )
            else:
                scaled = to_operand(scaled, OPERAND, PRECISION)
                centered = to_operand(centered, OPERAND, PRECISION)
                dx = tl.dot(whitening, scaled, dx, input_precision=PRECISION)
                of_statistics = tl.dot(
                    slope, centered, of_statistics, input_precision=PRECISION
                )
        dx += of_statistics

        inside = (rows < GROUPS)[:, None] & exists[None, :]
        if IN_PLACE:
            # all threads have read their part of the dy tile before any thread writes to it
            tl.debug_barrier()
        tl.store(
            dx_ptr + tile_offsets(rows, j, p, dx_outer, CPG, VECTOR, DX_J),
            dx,
            mask=inside,
        )


def grad_products(
    x: Tensor,
    mean: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    y: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Multiply gradient and input, and add over splits and channels, in two launches.

    With ``y``, the output of a fused ReLU, dY is ``dy`` masked to zero where y <= 0, and is stored
    in ``out``.

    Returns:
        The products G_j = dY_j X_C,j^T and, as one more row, the sums of dY_j:
        (C / g, N, g + 1, g). Both multiplied by the weight and added over j: dL/dW (N, g + 1, g).
        The largest |weight * dY| (N), if it is needed.
    """
    n, groups = mean.shape
    cpg = x.shape[1] // groups
    setting = tuning_for(x).products
    if y is not None:  # takes registers, too
        setting = setting._replace(tile_bytes=setting.tile_bytes // 2)
    if groups > 64:
        setting = setting._replace(stages=2)
    splits, columns = over_columns(setting, groups, one_j=True, x=x, dy=dy, masked=out)

    parts = plans.empty(x, cpg, n, splits, groups + 1, groups)
    part_largest = plans.empty(x, cpg, n, splits) if in_halves(x, groups) else None
    plans.run(
        _products, **columns,
        y_ptr=y, mean_ptr=mean, weight_ptr=weight, part_ptr=parts, largest_ptr=part_largest,
        samples=n, OPERAND=operand_dtype(x),
    )  # fmt: skip

    products = (
        parts[:, :, 0] if splits == 1 else plans.empty(x, cpg, n, groups + 1, groups)
    )
    grad = plans.empty(x, n, groups + 1, groups)
    largest = None if part_largest is None else plans.empty(x, n)
    # 64 elements of a thread, read at once
    at_once = min(256, triton.next_power_of_2(splits))
    jb = min(triton.next_power_of_2(cpg), 256 // at_once)
    block = min(8192 // (jb * at_once), 256)
    plans.run(
        _reduce, (n, triton.cdiv(groups * (groups + 1), block)), like=x, warps=4, stages=2,
        part_ptr=parts, part_largest_ptr=part_largest, product_ptr=products if splits > 1 else None,
        weight_ptr=weight, grad_ptr=grad, largest_ptr=largest, samples=n, splits=splits,
        GROUPS=groups, CPG=cpg, JB=jb, AT_ONCE=at_once, BLOCK=block,
    )  # fmt: skip
    return products, grad, largest


def matrix_gradients(
    products: Tensor,
    whitening: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    sigma: Tensor,
    grad: Tensor,
    num_iters: int,
    kept: Tensor | None,
) -> Tensor:
    """Write the gradients of weight and bias (C,), and return the symmetric dL/dSigma.

    With ``kept`` in one launch. Without, torch computes dL/dSigma, and the whitening matrices are
    written as well.
    """
    cpg, n = products.shape[:2]
    groups = sigma.shape[1]
    rows = padded_rows(groups)
    grad_sigma = plans.empty(sigma, *sigma.shape)
    if kept is None:
        with autocast_off(sigma.device.type):
            matrices, gradients = newton_backward(sigma, grad[:, :-1], num_iters)
        whitening.copy_(matrices)
        grad_sigma.copy_(gradients)

    programs = cpg * groups if kept is None else cpg * groups + n
    plans.run(
        _matrix_gradients, (programs, 1), like=products, warps=4, stages=3,
        product_ptr=products, whitening_ptr=whitening, dweight_ptr=dweight, dbias_ptr=dbias,
        sigma_ptr=sigma, kept_ptr=kept, grad_ptr=grad, grad_sigma_ptr=grad_sigma,
        zero=zero_variance_threshold(torch.float32), samples=n, cpg=cpg,
        GROUPS=groups, ROWS=rows, AT_ONCE=2048 // rows, ITERS=num_iters,
    )  # fmt: skip
    return grad_sigma


def apply_backward(
    x: Tensor,
    mean: Tensor,
    sigma: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    whitening: Tensor,
    grad_sigma: Tensor,
    grad: Tensor,
    largest: Tensor | None,
    out: Tensor,
) -> None:
    """Write dX to ``out``, which may be ``dy``, in one launch.

    dX = W (weight * dY - grad_mean / M) + 2 / M dL/dSigma (X - mean); grad_mean is the last row of
    ``grad``.
    """
    groups = mean.shape[1]
    setting = tuning_for(x).apply_backward
    _, columns = over_columns(setting, groups, matrix=True, x=x, dy=dy, dx=out)
    plans.run(
        _apply_backward, **columns,
        mean_ptr=mean, sigma_ptr=sigma, whitening_ptr=whitening, weight_ptr=weight,
        grad_sigma_ptr=grad_sigma, grad_ptr=grad, largest_ptr=largest, IN_PLACE=dy is out,
    )  # fmt: skip
