"""Newton's iteration ("ItN"), the published solver of Group Whitening."""

import torch
from torch import Tensor

from ..tensors import zero_variance_threshold


def newton_inverse_sqrt(sigma: Tensor, num_iters: int = 5) -> Tensor:
    r"""Approximate :math:`\Sigma^{-1/2}` by ``num_iters`` steps of Newton's iteration ("ItN").

    .. math::
        \Sigma_N = \Sigma / \mathrm{tr}(\Sigma), \quad P_0 = I, \quad
        P_k = \tfrac{1}{2} (3 P_{k-1} - P_{k-1}^3 \Sigma_N), \quad W = P_T / \sqrt{\mathrm{tr}(\Sigma)}

    With the published setting (5 steps, g = 64) the iteration has not converged: whitened Gaussian input has variance
    0.586, not 1. Pretrained weights depend on exactly this matrix, so more steps or an exact solver is another network.

    The steps are computed as :math:`P_k = P_{k-1} R_k`, :math:`R_k = \tfrac{1}{2} (3 I - Q_{k-1})`, with the update
    :math:`Q_k = P_k^2 \Sigma_N = Q_{k-1} R_k^2`. Figure 1 of the supplement computes :math:`P_{k-1}^3 \Sigma_N` anew in
    each step; there rounding grows without bound from about 12 steps on in float32.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).
        num_iters: the number of steps T; 0 gives :math:`I / \sqrt{\mathrm{tr}(\Sigma)}`.

    Returns:
        The whitening matrices W, (..., g, g).

    Source: Group Whitening, Eqs. 6-7; Higham, "Stable iterations for the matrix square root" (1997).
    """
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    alive = trace > zero_variance_threshold(sigma.dtype)
    safe_trace = torch.where(alive, trace, torch.ones_like(trace))
    sigma_n = sigma / safe_trace
    identity = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device).expand_as(sigma)
    p, q = identity, sigma_n
    for step in range(num_iters):
        r = 1.5 * identity - 0.5 * q
        p = p @ r if step else r
        if step + 1 < num_iters:
            q = q @ r @ r
    return p * torch.where(alive, safe_trace.rsqrt(), torch.zeros_like(trace))
