"""Whitening matrices by eigendecomposition."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .covariance import NonFiniteCovarianceError, zero_variance


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
    floor = (torch.finfo(sigma.dtype).eps * eigenvalues[..., -1:]).clamp_min(zero_variance(sigma.dtype))
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
