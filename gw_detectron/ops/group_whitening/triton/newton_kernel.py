"""Newton's iteration and its backward pass, one launch for all samples."""

from __future__ import annotations  # without triton, constexpr is only a name in the signatures

import torch
from torch import Tensor

from ...checks import zero_variance_threshold
from . import launch_args as launch
from .compiler import constexpr, jit, tl
from .tiles import load_matrix, store_matrix


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
        for k in tl.range(ROWS // DEPTH, num_stages=3):
            x_part = tl.load(x_ptr + _padded(i, k, ROWS, BLOCK, DEPTH))
            q_part = tl.load(q_ptr + _padded(k, j, ROWS, DEPTH, BLOCK))
            product = tl.dot(x_part, q_part, product, input_precision=PRECISION)
            if TANGENT:
                dq_part = tl.load(q_ptr + TANGENT + _padded(k, j, ROWS, DEPTH, BLOCK))
                tangent = tl.dot(x_part, dq_part, tangent, input_precision=PRECISION)
                dx_part = tl.load(x_ptr + TANGENT + _padded(i, k, ROWS, BLOCK, DEPTH))
                tangent = tl.dot(dx_part, q_part, tangent, input_precision=PRECISION)
        at = _padded(i, j, ROWS, BLOCK, BLOCK)
        tl.store(out_ptr + at, 1.5 * tl.load(x_ptr + at) - 0.5 * product)
        if TANGENT:
            tl.store(out_ptr + TANGENT + at, 1.5 * tl.load(x_ptr + TANGENT + at) - 0.5 * tangent)


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
                grad = load_matrix(grad_ptr, n, rows, columns, GROUPS)
                grad += tl.trans(load_matrix(grad_ptr, n, columns, rows, GROUPS))
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
                grad = load_matrix(grad_ptr, n, rows, columns, GROUPS)
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


def newton(sigma: Tensor, num_iters: int) -> Tensor:
    """Implement ``Backend.newton`` in one launch."""
    whitening = torch.empty_like(sigma, memory_format=torch.contiguous_format)
    _launch_newton(sigma, None, whitening, None, num_iters)
    return whitening


def newton_backward(sigma: Tensor, grad: Tensor, num_iters: int) -> tuple[Tensor, Tensor]:
    """Implement ``Backend.newton_backward`` in one launch."""
    whitening = torch.empty_like(sigma, memory_format=torch.contiguous_format)
    grad_sigma = torch.empty_like(whitening)
    _launch_newton(sigma, grad.contiguous(), whitening, grad_sigma, num_iters)
    return whitening, grad_sigma


def _launch_newton(
    sigma: Tensor, grad: Tensor | None, whitening: Tensor, grad_sigma: Tensor | None, num_iters: int
) -> None:
    n, groups = sigma.shape[:2]
    rows = launch.padded_rows(groups)
    programs = min(n, launch.processors(sigma.device))  # the workspaces of more would not stay in the caches
    workspace = launch.empty(sigma, programs, 5 if grad is None else 10, rows, rows)
    launch.run(
        _newton, (programs, 1), like=sigma, warps=8, stages=1,
        sigma_ptr=sigma.contiguous(), grad_ptr=grad, whitening_ptr=whitening, grad_sigma_ptr=grad_sigma,
        workspace_ptr=workspace, samples=n, num_iters=num_iters, zero=zero_variance_threshold(torch.float32),
        GROUPS=groups, ROWS=rows, BLOCK=min(rows, 64), DEPTH=16, PRECISION="tf32x3",
    )  # fmt: skip
