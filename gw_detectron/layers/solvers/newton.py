"""Newton's iteration for the inverse square root ("ItN"), the published solver of Group Whitening."""

import torch
from torch import Tensor

from .covariance import zero_variance


def newton_inverse_sqrt(sigma: Tensor, num_iters: int = 5) -> Tensor:
    r"""Approximates :math:`\Sigma^{-1/2}` by ``num_iters`` steps of Newton's iteration ("ItN").

    .. math::
        \Sigma_N = \Sigma / \mathrm{tr}(\Sigma), \quad P_0 = I, \quad
        P_k = \tfrac{1}{2} (3 P_{k-1} - P_{k-1}^3 \Sigma_N), \quad W = P_T / \sqrt{\mathrm{tr}(\Sigma)}

    With the published setting (5 steps, g = 64) the iteration has not converged: whitened Gaussian input has variance
    0.586, not 1. Pretrained weights depend on exactly this matrix, so more steps or an exact solver is another network.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).
        num_iters: the number of steps T; 0 gives :math:`I / \sqrt{\mathrm{tr}(\Sigma)}`.

    Returns:
        The whitening matrices W, (..., g, g).

    Source: Group Whitening, Eqs. 6-7; the order of products is that of its supplement, Figure 1.
    """
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    alive = trace > zero_variance(sigma.dtype)
    safe_trace = torch.where(alive, trace, torch.ones_like(trace))
    sigma_n = sigma / safe_trace
    p = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device).expand_as(sigma)
    for _ in range(num_iters):
        p = 1.5 * p - 0.5 * (p @ p @ p @ sigma_n)
    return p * torch.where(alive, safe_trace.rsqrt(), torch.zeros_like(trace))
