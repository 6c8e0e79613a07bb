"""Newton's iteration and its backward pass, one program for each sample."""

from __future__ import (
    annotations,  # without triton, constexpr is only a name in the signatures
)

import torch
from torch import Tensor

from ...numerics import autocast_off, zero_variance_threshold
from ...solvers.newton import newton_inverse_sqrt
from . import plans
from .compiler import constexpr, jit, tl
from .device_functions import (
    half_scale,
    load_matrix,
    multiply_half,
    split_half,
    store_matrix,
)
from .tiling import padded_rows


@jit
def _kept_of(kept_ptr, n, rows, ITERS: constexpr):
    """Return pointers to the first matrix that is kept of a sample."""
    side: constexpr = rows.shape[0]
    return (
        kept_ptr
        + n.to(tl.int64) * (10 * side * side * ((ITERS + 1) // 2))
        + rows[:, None] * side
        + rows[None, :]
    )


@jit
def _keep(kept_ptr, place: constexpr, high, low):
    """Store an operand; its place is that of q, z, f, p or t in the factor."""
    if kept_ptr is not None:
        SIZE: constexpr = high.shape[0] * high.shape[1]
        tl.store(kept_ptr + 2 * place * SIZE, high)
        tl.store(kept_ptr + (2 * place + 1) * SIZE, low)


@jit
def _kept(kept_ptr, place: constexpr):
    SIZE: constexpr = kept_ptr.shape[0] * kept_ptr.shape[1]
    return tl.load(kept_ptr + 2 * place * SIZE), tl.load(
        kept_ptr + (2 * place + 1) * SIZE
    )


@jit
def _from_right(a, kept_ptr, place: constexpr):
    """Compute a b for a kept matrix b."""
    a_high, a_low = split_half(a)
    high, low = _kept(kept_ptr, place)
    return multiply_half(a_high, a_low, high, low)


@jit
def _from_left(kept_ptr, place: constexpr, a):
    """Compute b a for a kept matrix b."""
    a_high, a_low = split_half(a)
    high, low = _kept(kept_ptr, place)
    return multiply_half(high, low, a_high, a_low)


@jit
def _symmetric_product(a, kept_ptr, place: constexpr):
    """Compute a b + b a for symmetric a and a kept matrix b."""
    half = _from_right(a, kept_ptr, place)
    return half + tl.trans(half)


@jit
def _normalized(sigma_ptr, n, zero, rows, GROUPS: constexpr):
    """Return Sigma / tr(Sigma), tr(Sigma), its inverse root and the identity.

    The root is 0 for a covariance that counts as zero.
    """
    eye = (rows[:, None] == rows[None, :]) & (rows < GROUPS)[:, None]
    sigma = load_matrix(sigma_ptr, n, rows, rows, GROUPS)
    trace = tl.sum(tl.sum(tl.where(eye, sigma, 0.0), 1), 0)
    alive = trace > zero
    trace = tl.where(alive, trace, 1.0)
    inv_sqrt = tl.where(alive, 1.0 / tl.sqrt(trace), 0.0)
    return sigma / trace, trace, inv_sqrt, eye


@jit
def _newton_in_registers(
    sigma_ptr,
    whitening_ptr,
    kept_ptr,
    zero,
    GROUPS: constexpr,
    ROWS: constexpr,
    ITERS: constexpr,
):
    """Compute the whitening matrix of a sample, in 10 products for T = 5.

    The scheme is that of ``ops/solvers/newton.py``, with its names. If kept_ptr is given, the
    operands of the tangents are kept there. Loops are unrolled: with branches at run time, the
    matrices would not fit Hopper's registers. Other GPUs spill some.
    """
    n = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    q, _, inv_sqrt, eye = _normalized(sigma_ptr, n, zero, rows, GROUPS)
    p = tl.where(eye, 1.0, 0.0)
    if kept_ptr is not None:
        kept_ptr = _kept_of(kept_ptr, n, rows, ITERS)

    for step in tl.static_range((ITERS + 1) // 2):
        q_high, q_low = split_half(q)
        c = 2.25 if 2 * step + 2 <= ITERS else 1.5
        if 2 * step + 2 <= ITERS:  # two steps at once
            _keep(kept_ptr, 5 * step, q_high, q_low)
            z = 0.25 * multiply_half(q_high, q_low, q_high, q_low) - 1.125 * q
            high, low = split_half(z)
            _keep(kept_ptr, 5 * step + 1, high, low)
            f = multiply_half(high, low, high, low) + 1.6875 * (
                z - 0.3194444444444444 * q
            )
        else:
            f = -0.5 * q
        f_high, f_low = split_half(f)
        _keep(kept_ptr, 5 * step + 2, f_high, f_low)

        if step == 0:
            p = f + tl.where(eye, c, 0.0)
        else:
            high, low = split_half(p)
            _keep(kept_ptr, 5 * step + 3, high, low)
            p = multiply_half(f_high, f_low, high, low) + c * p

        if 2 * step + 2 < ITERS:
            high, low = split_half(
                multiply_half(f_high, f_low, f_high, f_low) + 2 * c * f
            )
            _keep(kept_ptr, 5 * step + 4, high, low)
            q = multiply_half(high, low, q_high, q_low) + c * c * q

    store_matrix(whitening_ptr, n, rows, rows, p * inv_sqrt, GROUPS)


@jit
def covariance_gradient(
    sigma_ptr, whitening_ptr, kept_ptr, grad_ptr, grad_sigma_ptr, n, zero,
    GROUPS: constexpr, ROWS: constexpr, ITERS: constexpr,
):  # fmt: skip
    """Compute the symmetric dL/dSigma of sample n, in 14 products for T = 5.

    The operands are those that _newton_in_registers kept.
    """
    rows = tl.arange(0, ROWS)
    _, trace, inv_sqrt, eye = _normalized(sigma_ptr, n, zero, rows, GROUPS)
    grad = load_matrix(grad_ptr, n, rows, rows, GROUPS, 1)
    dq = 0.5 * inv_sqrt * (grad + tl.trans(grad))
    # tangents are linear in dq: scaled to about 1, which keeps them in the range of float16
    scale, inverse = half_scale(16384 * tl.max(tl.max(tl.abs(dq), 1), 0))
    dq *= scale

    p = load_matrix(whitening_ptr, n, rows, rows, GROUPS) * tl.sqrt(trace)
    # <dL/dW, P> / (2 sqrt(tr)), and later <dL/dS, S>
    along = tl.sum(tl.sum(0.5 * dq * p, 1), 0)
    dp = tl.zeros([ROWS, ROWS], tl.float32)
    kept_ptr = _kept_of(kept_ptr, n, rows, ITERS)

    for step in tl.static_range((ITERS + 1) // 2):
        c = 2.25 if 2 * step + 2 <= ITERS else 1.5
        if 2 * step + 2 <= ITERS:
            dz = 0.25 * _symmetric_product(dq, kept_ptr, 5 * step) - 1.125 * dq
            df = _symmetric_product(dz, kept_ptr, 5 * step + 1) + 1.6875 * (
                dz - 0.3194444444444444 * dq
            )
        else:
            df = -0.5 * dq

        if step == 0:
            dp = df
        else:
            dp = _from_right(dp, kept_ptr, 5 * step + 2) + c * dp
            dp += _from_left(kept_ptr, 5 * step + 3, df)

        if 2 * step + 2 < ITERS:
            dt = _symmetric_product(df, kept_ptr, 5 * step + 2) + 2 * c * df
            dq = _from_left(kept_ptr, 5 * step + 4, dq) + c * c * dq
            dq += _from_right(dt, kept_ptr, 5 * step)

    s = load_matrix(sigma_ptr, n, rows, rows, GROUPS) / trace
    along += tl.sum(tl.sum(dp * s, 1), 0)
    dp -= tl.where(eye, along, 0.0)
    store_matrix(
        grad_sigma_ptr, n, rows, rows, dp * inverse * inv_sqrt * inv_sqrt, GROUPS
    )


def in_registers(groups: int, num_iters: int) -> bool:
    """Whether a program can solve a sample; otherwise torch's batched products do.

    With more steps, tangents of singular directions leave the range of float16.
    """
    return groups <= 64 and num_iters <= 8


def operands(x: Tensor, groups: int, num_iters: int) -> Tensor:
    """Return scratch for the operands that ``newton`` keeps for ``covariance_gradient``."""
    rows = padded_rows(groups)
    return plans.empty(
        x, len(x), (num_iters + 1) // 2, 5, 2, rows, rows, dtype=torch.float16
    )


def newton(
    sigma: Tensor, num_iters: int, out: Tensor, kept: Tensor | None = None
) -> None:
    """Write the whitening matrices of ``sigma`` (N, g, g) to ``out``.

    The operands of the tangents go to ``kept``.
    """
    groups = sigma.shape[1]
    if not in_registers(groups, num_iters):
        with autocast_off(sigma.device.type):
            out.copy_(newton_inverse_sqrt(sigma, num_iters))
        return

    plans.run(
        _newton_in_registers, (len(sigma), 1), like=sigma, warps=4, stages=1,
        sigma_ptr=sigma, whitening_ptr=out, kept_ptr=kept, zero=zero_variance_threshold(torch.float32),
        GROUPS=groups, ROWS=padded_rows(groups), ITERS=num_iters,
    )  # fmt: skip
