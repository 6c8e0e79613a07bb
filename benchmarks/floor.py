"""The floor under the time of group whitening: its matrix products on a CPU, its memory traffic on a GPU.

Shapes: N samples, g groups (the side of the covariance), M = C / g * H * W columns, T steps of Newton's iteration.
"""

import torch
from torch import Tensor

from .timing import Step

#: products of two (g, g) matrices in one step of the solver. Forward: P^2, P^3, P^3 S with S = Sigma_N. Backward, with
#: the gradient D of P_k made symmetric and Q = P_{k-1}, which commutes with S: QD, Q(QD), (QD)Q, Q(Q^2 D) for dS, and
#: (DQ^2 + QDQ + Q^2 D)S for the gradient of Q
SOLVER_PRODUCTS = {"forward": 3, "forward+backward": 3 + 5}
#: products of depth g over all columns: Sigma = X X^T, Y = W X; backward G = dY X^T, dX = W dY + S X
BIG_PRODUCTS = {"forward": 2, "forward+backward": 2 + 3}
#: passes over the tensor in memory: forward x for the statistics, x again, y; backward x and dy twice, dx
PASSES = {"forward": 3, "forward+backward": 3 + 5}


def floor_flops(samples: int, groups: int, columns: int, iters: int, mode: str) -> int:
    r"""Floating point operations of :func:`products`, an addition and a multiplication counting as two.

    .. math:: 2 N (b g^2 M + s T g^3)

    with b :data:`BIG_PRODUCTS` and s :data:`SOLVER_PRODUCTS` of the mode. Sigma is counted as a full product, though a
    layer may use its symmetry, and P_1 as three products, though it needs none: the floor can be undercut.
    """
    big = BIG_PRODUCTS[mode] * groups**2 * columns
    return 2 * samples * (big + SOLVER_PRODUCTS[mode] * iters * groups**3)


def products(x: Tensor, groups: int, iters: int, mode: str) -> Step:
    """The bare products as a step to be timed, on dense tensors, without centring, affine or any other operation.

    Results are new tensors, as those of a layer are.

    Args:
        x: (N, C, H, W); its dtype is that of the big products. The solver's are in float32, or float64 like ``x``.
        groups: g, which divides C.
        iters: T.
        mode: ``forward`` or ``forward+backward``.
    """
    x_g = x.detach().reshape(x.shape[0], groups, -1)
    dy = torch.randn_like(x_g)
    # of norm about one, so that no product overflows or becomes subnormal, which a CPU is slow at
    small = torch.randn(x.shape[0], groups, groups, device=x.device) / groups**0.5
    small = small.to(torch.promote_types(x.dtype, torch.float32))
    whitening = small.to(x.dtype)

    def forward() -> tuple[Tensor, Tensor]:
        sigma = torch.bmm(x_g, x_g.mT)
        _solver(small, SOLVER_PRODUCTS["forward"] * iters)
        return sigma, torch.bmm(whitening, x_g)

    def forward_backward() -> tuple[Tensor, ...]:
        y = forward()
        grad_whitening = torch.bmm(dy, x_g.mT)
        _solver(small, (SOLVER_PRODUCTS["forward+backward"] - SOLVER_PRODUCTS["forward"]) * iters)
        return *y, grad_whitening, torch.baddbmm(torch.bmm(whitening, dy), whitening, x_g)

    return Step(torch.no_grad()(forward if mode == "forward" else forward_backward))


def _solver(small: Tensor, count: int) -> None:
    for _ in range(count):
        torch.bmm(small, small)


def traffic(x: Tensor, mode: str) -> Step:
    """A copy that moves the bytes a normalisation over each sample has to move, as a step to be timed.

    A copy reads and writes every byte, so half of the :data:`PASSES` over ``x`` are copied.
    """
    source = torch.empty(PASSES[mode] * x.numel() // 2, dtype=x.dtype, device=x.device).normal_()
    target = torch.empty_like(source)
    return Step(lambda: target.copy_(source))
