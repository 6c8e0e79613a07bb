"""Newton's iteration and its backward pass, one launch for all samples."""

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

import torch
from torch import Tensor

from ...checks import zero_variance_threshold
from . import launch
from .compiler import constexpr, jit, tl
from .tiles import half_scale, load_matrix, multiply_half, split_half, store_matrix


@jit
def _kept_of(kept_ptr, n, rows, ITERS: constexpr):
    """Return pointers to the first matrix that is kept of a sample."""
    side: constexpr = rows.shape[0]
    return kept_ptr + n.to(tl.int64) * (10 * side * side * ((ITERS + 1) // 2)) + rows[:, None] * side + rows[None, :]


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
    return tl.load(kept_ptr + 2 * place * SIZE), tl.load(kept_ptr + (2 * place + 1) * SIZE)


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
    """Return Sigma / tr(Sigma), tr(Sigma), its inverse root (0 for a covariance that counts as zero) and the identity."""
    eye = (rows[:, None] == rows[None, :]) & (rows < GROUPS)[:, None]
    sigma = load_matrix(sigma_ptr, n, rows, rows, GROUPS)
    trace = tl.sum(tl.sum(tl.where(eye, sigma, 0.0), 1), 0)
    alive = trace > zero
    trace = tl.where(alive, trace, 1.0)
    return sigma / trace, trace, tl.where(alive, 1.0 / tl.sqrt(trace), 0.0), eye


@jit
def _newton_in_registers(
    sigma_ptr, whitening_ptr, kept_ptr, zero, GROUPS: constexpr, ROWS: constexpr, ITERS: constexpr
):
    """Compute the whitening matrix of a sample, in 10 products for T = 5.

    The scheme is that of ``ops/solvers/newton.py``, with its names. If kept_ptr is given, the operands of the tangents
    are kept there. Loops are unrolled: with branches at run time, the matrices would not fit the registers.
    """
    n, rows = tl.program_id(0), tl.arange(0, ROWS)
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
            f = multiply_half(high, low, high, low) + 1.6875 * (z - 0.3194444444444444 * q)
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
            high, low = split_half(multiply_half(f_high, f_low, f_high, f_low) + 2 * c * f)
            _keep(kept_ptr, 5 * step + 4, high, low)
            q = multiply_half(high, low, q_high, q_low) + c * c * q
    store_matrix(whitening_ptr, n, rows, rows, p * inv_sqrt, GROUPS)


@jit
def covariance_gradient(
    sigma_ptr, whitening_ptr, kept_ptr, grad_ptr, grad_sigma_ptr, n, zero,
    GROUPS: constexpr, ROWS: constexpr, ITERS: constexpr,
):  # fmt: skip
    """Compute the symmetric dL/dSigma of sample n, in 14 products for T = 5, from what _newton_in_registers kept."""
    rows = tl.arange(0, ROWS)
    _, trace, inv_sqrt, eye = _normalized(sigma_ptr, n, zero, rows, GROUPS)
    grad = load_matrix(grad_ptr, n, rows, rows, GROUPS, 1)
    dq = 0.5 * inv_sqrt * (grad + tl.trans(grad))
    # tangents are linear in dq: scaled to about 1, which keeps them in the range of float16
    scale, inverse = half_scale(16384 * tl.max(tl.max(tl.abs(dq), 1), 0))
    dq *= scale
    p = load_matrix(whitening_ptr, n, rows, rows, GROUPS) * tl.sqrt(trace)
    along = tl.sum(tl.sum(0.5 * dq * p, 1), 0)  # <dL/dW, P> / (2 sqrt(tr)), and later <dL/dS, S>
    dp = tl.zeros([ROWS, ROWS], tl.float32)
    kept_ptr = _kept_of(kept_ptr, n, rows, ITERS)
    for step in tl.static_range((ITERS + 1) // 2):
        c = 2.25 if 2 * step + 2 <= ITERS else 1.5
        if 2 * step + 2 <= ITERS:
            dz = 0.25 * _symmetric_product(dq, kept_ptr, 5 * step) - 1.125 * dq
            df = _symmetric_product(dz, kept_ptr, 5 * step + 1) + 1.6875 * (dz - 0.3194444444444444 * dq)
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
    store_matrix(grad_sigma_ptr, n, rows, rows, dp * inverse * inv_sqrt * inv_sqrt, GROUPS)


@jit
def _padded(i, j, ROWS: constexpr, HEIGHT: constexpr, WIDTH: constexpr):
    """Return the offsets of block (i, j) of a padded matrix."""
    return (i * HEIGHT + tl.arange(0, HEIGHT))[:, None] * ROWS + (j * WIDTH + tl.arange(0, WIDTH))[None, :]


@jit
def _times_r(
    x_ptr, q_ptr, out_ptr,
    ROWS: constexpr, BLOCK: constexpr, DEPTH: constexpr, TANGENT: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute X R and, if TANGENT, its derivative; X R = (3 X - X Q) / 2.

    The derivative of a matrix is stored TANGENT elements after it.
    """
    SIDE: constexpr = ROWS // BLOCK
    for block in tl.range(SIDE * SIDE, num_stages=1):
        i, j = block // SIDE, block % SIDE
        product = tl.zeros([BLOCK, BLOCK], tl.float32)
        tangent = tl.zeros([BLOCK, BLOCK], tl.float32)
        other = tl.zeros([BLOCK, BLOCK], tl.float32)  # one product per accumulator: see triton-lang/triton#10821
        for k in tl.range(ROWS // DEPTH, num_stages=3):
            x_part = tl.load(x_ptr + _padded(i, k, ROWS, BLOCK, DEPTH))
            q_part = tl.load(q_ptr + _padded(k, j, ROWS, DEPTH, BLOCK))
            product = tl.dot(x_part, q_part, product, input_precision=PRECISION)
            if TANGENT:
                dq_part = tl.load(q_ptr + TANGENT + _padded(k, j, ROWS, DEPTH, BLOCK))
                tangent = tl.dot(x_part, dq_part, tangent, input_precision=PRECISION)
                dx_part = tl.load(x_ptr + TANGENT + _padded(i, k, ROWS, BLOCK, DEPTH))
                other = tl.dot(dx_part, q_part, other, input_precision=PRECISION)
        at = _padded(i, j, ROWS, BLOCK, BLOCK)
        tl.store(out_ptr + at, 1.5 * tl.load(x_ptr + at) - 0.5 * product)
        if TANGENT:
            tl.store(out_ptr + TANGENT + at, 1.5 * tl.load(x_ptr + TANGENT + at) - 0.5 * (tangent + other))


@jit
def _newton(
    sigma_ptr, grad_ptr, whitening_ptr, grad_sigma_ptr, workspace_ptr, samples, num_iters, zero,
    GROUPS: constexpr, ROWS: constexpr, BLOCK: constexpr, DEPTH: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute the whitening matrices and, if grad_ptr is given, dL/dSigma.

    W = P_T / sqrt(tr Sigma). With S = Sigma / tr Sigma, Q = P^2 S and R = (3 I - Q) / 2, a step is P <- P R and
    Q <- Q R R, because all matrices are polynomials of S and commute. The iteration takes 3 (T - 1) products, and
    rounding does not grow.

    A polynomial of a symmetric matrix has a self-adjoint derivative. So dL/dS is the derivative of P_T in the direction
    sym(dL/dW) / sqrt(tr Sigma), computed in forward mode by the same iteration, without saved matrices. S and W also
    depend on the trace, which adds a multiple of the identity.

    Matrices pass between products through a workspace, which stays in the caches. Registers and shared memory hold one
    block of a product, whatever g and the device are.
    """
    SIDE: constexpr = ROWS // BLOCK
    SIZE: constexpr = ROWS * ROWS
    TANGENT: constexpr = 0 if grad_ptr is None else 5 * SIZE
    t_ptr = workspace_ptr + tl.program_id(0).to(tl.int64) * (5 * SIZE + TANGENT)
    q_ptr, p_ptr = t_ptr + SIZE, t_ptr + 3 * SIZE  # two buffers each: one to read, one to write
    n = tl.program_id(0).to(tl.int64)
    while n < samples:
        r = tl.arange(0, ROWS)
        diagonal = tl.load(sigma_ptr + n * (GROUPS * GROUPS) + r * (GROUPS + 1), mask=r < GROUPS, other=0.0)
        trace = tl.sum(diagonal, 0)
        alive = trace > zero
        trace = tl.where(alive, trace, 1.0)
        inv_sqrt = tl.where(alive, 1.0 / tl.sqrt(trace), 0.0)  # 0 for a covariance that counts as zero
        for block in tl.range(SIDE * SIDE, num_stages=1):
            i, j = block // SIDE, block % SIDE
            rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
            at = _padded(i, j, ROWS, BLOCK, BLOCK)
            q = load_matrix(sigma_ptr, n, rows, columns, GROUPS) / trace
            first = tl.where(num_iters > 0, 0.5, 0.0)  # the first step needs no product
            identity = (rows[:, None] == columns[None, :]) & (rows < GROUPS)[:, None]
            tl.store(q_ptr + at, q)
            tl.store(p_ptr + at, tl.where(identity, 1.0 + first, 0.0) - first * q)
            if TANGENT:
                grad = load_matrix(grad_ptr, n, rows, columns, GROUPS, 1)
                grad += tl.trans(load_matrix(grad_ptr, n, columns, rows, GROUPS, 1))
                tl.store(q_ptr + TANGENT + at, 0.5 * inv_sqrt * grad)
                tl.store(p_ptr + TANGENT + at, -0.5 * first * inv_sqrt * grad)
        tl.debug_barrier()
        for step in tl.range(1, num_iters, num_stages=1):
            old, new = (step + 1) % 2 * SIZE, step % 2 * SIZE
            _times_r(q_ptr + old, q_ptr + old, t_ptr, ROWS, BLOCK, DEPTH, TANGENT, PRECISION)
            tl.debug_barrier()
            _times_r(t_ptr, q_ptr + old, q_ptr + new, ROWS, BLOCK, DEPTH, TANGENT, PRECISION)
            tl.debug_barrier()
            _times_r(p_ptr + old, q_ptr + new, p_ptr + new, ROWS, BLOCK, DEPTH, TANGENT, PRECISION)
        tl.debug_barrier()
        p_ptr_last = p_ptr + (tl.maximum(num_iters, 1) + 1) % 2 * SIZE
        along = 0.0  # <dL/dS, S> + <dL/dW, P_T> / (2 sqrt(tr))
        for block in tl.range(SIDE * SIDE, num_stages=1):
            i, j = block // SIDE, block % SIDE
            rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
            p = tl.load(p_ptr_last + _padded(i, j, ROWS, BLOCK, BLOCK))
            store_matrix(whitening_ptr, n, rows, columns, p * inv_sqrt, GROUPS)
            if TANGENT:
                dp = tl.load(p_ptr_last + TANGENT + _padded(i, j, ROWS, BLOCK, BLOCK))
                grad = load_matrix(grad_ptr, n, rows, columns, GROUPS, 1)
                s = load_matrix(sigma_ptr, n, rows, columns, GROUPS) / trace
                along += tl.sum(tl.sum(dp * s + 0.5 * inv_sqrt * grad * p, 1), 0)
        if TANGENT:
            for block in tl.range(SIDE * SIDE, num_stages=1):
                i, j = block // SIDE, block % SIDE
                rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
                dp = tl.load(p_ptr_last + TANGENT + _padded(i, j, ROWS, BLOCK, BLOCK))
                dp -= tl.where(rows[:, None] == columns[None, :], along, 0.0)
                store_matrix(grad_sigma_ptr, n, rows, columns, dp * inv_sqrt * inv_sqrt, GROUPS)
        tl.debug_barrier()  # before the next sample overwrites the workspace
        n += tl.num_programs(0)


def in_registers(like: Tensor, groups: int, num_iters: int) -> bool:
    """Whether matrices stay in registers between products, on Hopper; otherwise they pass through a workspace.

    With more steps, tangents of singular directions leave the range of float16.
    """
    return groups <= 64 and num_iters <= 8 and launch.is_hopper(like)


def operands(x: Tensor, groups: int, num_iters: int) -> Tensor:
    """Return scratch for the operands that ``newton`` keeps for ``covariance_gradient``."""
    rows = launch.padded_rows(groups)
    return launch.empty(x, len(x), (num_iters + 1) // 2, 5, 2, rows, rows, dtype=torch.float16)


def newton(sigma: Tensor, num_iters: int, out: Tensor, kept: Tensor | None = None) -> None:
    """Write the whitening matrices of ``sigma`` (N, g, g) to ``out``, in one launch, and operands to ``kept``."""
    if not in_registers(sigma, sigma.shape[1], num_iters):
        newton_in_workspace(sigma, None, out, None, num_iters)
        return
    groups = sigma.shape[1]
    launch.run(
        _newton_in_registers, (len(sigma), 1), like=sigma, warps=4, stages=1,
        sigma_ptr=sigma, whitening_ptr=out, kept_ptr=kept, zero=zero_variance_threshold(torch.float32),
        GROUPS=groups, ROWS=launch.padded_rows(groups), ITERS=num_iters,
    )  # fmt: skip


def newton_in_workspace(
    sigma: Tensor, grad: Tensor | None, whitening: Tensor, grad_sigma: Tensor | None, num_iters: int
) -> None:
    """Write the whitening matrices and, given ``grad`` (N, g + 1, g) of ``reduce``, the symmetric dL/dSigma."""
    n, groups = sigma.shape[:2]
    rows = launch.padded_rows(groups)
    programs = min(n, launch.processors(sigma.device))  # the workspaces of more would not stay in the caches
    workspace = launch.empty(sigma, programs, 5 if grad is None else 10, rows, rows)
    launch.run(
        _newton, (programs, 1), like=sigma, warps=8 if rows > 64 else 4, stages=1,
        sigma_ptr=sigma, grad_ptr=grad, whitening_ptr=whitening, grad_sigma_ptr=grad_sigma,
        workspace_ptr=workspace, samples=n, num_iters=num_iters, zero=zero_variance_threshold(torch.float32),
        GROUPS=groups, ROWS=rows, BLOCK=min(rows, 64), DEPTH=16, PRECISION="tf32x3",
    )  # fmt: skip
