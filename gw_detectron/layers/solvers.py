"""Whitening matrices of covariance matrices, each solver with a backward pass that stays finite.

Shape shorthand: ``g`` is the side of a covariance matrix, ``...`` any number of batch dimensions.

A covariance that is zero (a constant sample and no ``eps``) has no inverse square root. The solvers take the
pseudo-inverse there, a zero matrix, so that the whitened output and its gradient are zero instead of NaN.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class NonFiniteCovarianceError(FloatingPointError, ValueError):
    """A covariance matrix holds NaN or infinity, so it has no eigenvalues."""


def _zero_variance(dtype: torch.dtype) -> float:
    """Variance up to this counts as zero: the backward pass holds variance^(-3/2), which must stay in range."""
    return torch.finfo(dtype).tiny ** 0.5


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
    alive = trace > _zero_variance(sigma.dtype)
    safe_trace = torch.where(alive, trace, torch.ones_like(trace))
    sigma_n = sigma / safe_trace
    p = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device).expand_as(sigma)
    for _ in range(num_iters):
        p = 1.5 * p - 0.5 * (p @ p @ p @ sigma_n)
    return p * torch.where(alive, safe_trace.rsqrt(), torch.zeros_like(trace))


def zca_inverse_sqrt(sigma: Tensor) -> Tensor:
    r""":math:`\Sigma^{-1/2} = D \Lambda^{-1/2} D^T` by eigendecomposition (ZCA whitening).

    The backward pass uses the divided differences of :math:`\lambda^{-1/2}`,

    .. math::
        \frac{\lambda_i^{-1/2} - \lambda_j^{-1/2}}{\lambda_i - \lambda_j}
        = \frac{-1}{\sqrt{\lambda_i} \sqrt{\lambda_j} (\sqrt{\lambda_i} + \sqrt{\lambda_j})} ,

    which equals the published backward pass and, unlike its :math:`1 / (\lambda_i - \lambda_j)`, is finite for equal
    eigenvalues. Eigenvalues that cannot be told from zero in the matrix's precision are taken as zero variance.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).

    Returns:
        The whitening matrices, (..., g, g).

    Raises:
        NonFiniteCovarianceError: ``sigma`` holds NaN or infinity.

    Source: Group Whitening supplement, Eqs. 1-3; Decorrelated Batch Normalization, Eqs. 4-6.
    """
    return _ZCAInverseSqrt.apply(sigma) if sigma.requires_grad else _zca_forward(sigma)[0]


def _zca_forward(sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the whitening matrices, the eigenvectors D, and :math:`\\lambda^{-1/2}` (0 for a zero eigenvalue)."""
    try:
        eigenvalues, eigenvectors = torch.linalg.eigh(sigma)
    except RuntimeError as error:  # torch.linalg.LinAlgError, or the solver library of a GPU
        if not torch.isfinite(sigma).all():
            raise NonFiniteCovarianceError(
                "zca whitening: the covariance matrix holds NaN or infinity; check the input"
            ) from error
        raise
    # eigh returns ascending eigenvalues, exact to rounding of the largest one
    floor = (torch.finfo(sigma.dtype).eps * eigenvalues[..., -1:]).clamp_min(_zero_variance(sigma.dtype))
    alive = eigenvalues > floor
    inv_sqrt = torch.where(alive, torch.where(alive, eigenvalues, torch.ones_like(eigenvalues)).rsqrt(), 0.0)
    return (eigenvectors * inv_sqrt[..., None, :]) @ eigenvectors.mT, eigenvectors, inv_sqrt


class _ZCAInverseSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sigma: Tensor) -> Tensor:
        whitening, eigenvectors, inv_sqrt = _zca_forward(sigma)
        ctx.save_for_backward(eigenvectors, inv_sqrt)
        return whitening

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        d, r = ctx.saved_tensors
        ri, rj = r[..., :, None], r[..., None, :]
        # with r = lambda^{-1/2} the divided difference is -r_i^2 r_j^2 / (r_i + r_j)
        total = ri + rj
        difference = -((ri * rj) ** 2) / torch.where(total > 0, total, torch.ones_like(total))
        symmetric_grad = 0.5 * (grad + grad.mT)
        return d @ (difference * (d.mT @ symmetric_grad @ d)) @ d.mT


#: name -> ``solver(sigma, num_iters)``; an exact solver has no use for ``num_iters``
SOLVERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "newton": newton_inverse_sqrt,
    "zca": lambda sigma, num_iters: zca_inverse_sqrt(sigma),
}
