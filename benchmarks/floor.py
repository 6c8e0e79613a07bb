"""A lower bound for the time of Group Whitening: its matrix products on a CPU, its memory traffic on a GPU.

Shapes: N samples, g groups (the side of the covariance), M = C / g * H * W columns, T steps of Newton's iteration.
"""

import torch
from torch import Tensor

from .timing import Step

#: (g, g) products of one solver step. Forward: P^2, P^3, P^3 S with S = Sigma_N. Backward, with D the symmetric part of
#: the gradient of P_k, and Q = P_{k-1}, which commutes with S: QD, Q(QD), (QD)Q, Q(Q^2 D) for dS, and
#: (DQ^2 + QDQ + Q^2 D)S for the gradient of Q
SOLVER_PRODUCTS = {"forward": 3, "forward+backward": 3 + 5}
#: passes over the tensor in memory: forward x for the statistics, x again, y; backward x and dy twice, dx
PASSES = {"forward": 3, "forward+backward": 3 + 5}


def products(x: Tensor, groups: int, iters: int, mode: str) -> Step:
    """Return a step that does only the matrix products: no centering, no affine.

    Results are new tensors, like the results of a layer. A layer can be faster: it can use the symmetry of Sigma, which
    counts as a full product, and P_1, which counts as three products, needs none.

    Args:
        x: (N, C, H, W). Its dtype is the dtype of the big products; the solver's products are at least float32.
        groups: g, which divides C.
        iters: T.
        mode: ``forward`` or ``forward+backward``.
    """
    x_g = x.detach().reshape(x.shape[0], groups, -1)
    dy = torch.randn_like(x_g)
    # of norm about one, so that no product overflows or becomes subnormal, which is slow on a CPU
    small = torch.randn(x.shape[0], groups, groups, device=x.device) / groups**0.5
    small = small.to(torch.promote_types(x.dtype, torch.float32))
    whitening = small.to(x.dtype)

    def solve(count: int) -> None:
        for _ in range(count * iters):
            torch.bmm(small, small)

    @torch.no_grad()
    def run() -> tuple[Tensor, ...]:
        sigma = torch.bmm(x_g, x_g.mT)
        solve(SOLVER_PRODUCTS["forward"])
        y = torch.bmm(whitening, x_g)
        if mode == "forward":
            return sigma, y
        grad_whitening = torch.bmm(dy, x_g.mT)
        solve(SOLVER_PRODUCTS[mode] - SOLVER_PRODUCTS["forward"])
        return sigma, y, grad_whitening, torch.baddbmm(torch.bmm(whitening, dy), whitening, x_g)

    return Step(run)


def traffic(x: Tensor, mode: str) -> Step:
    """Return a step that moves as many bytes as a normalization of each sample must move.

    A copy reads and writes every byte, so it copies half of the :data:`PASSES` over ``x``.
    """
    source = torch.empty(PASSES[mode] * x.numel() // 2, dtype=x.dtype, device=x.device).normal_()
    target = torch.empty_like(source)
    return Step(lambda: target.copy_(source))
