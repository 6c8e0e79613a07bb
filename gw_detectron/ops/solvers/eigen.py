r"""Whitening matrices by eigendecomposition: ZCA, its two thresholded versions, and PCA.

Their matrices are functions of the eigenvalues, :math:`W = D \, r(\Lambda) D^T`, or of PCA :math:`r(\Lambda) D^T`,
with :math:`r(\lambda) = \lambda^{-1/2}` where :math:`\lambda` can be told from zero and 0 elsewhere.
"""

from collections.abc import Callable
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
    return _spectral(sigma, "zca", None, 0.0)


def zca_max_inverse_sqrt(sigma: Tensor, threshold: float = 0.01, eps: float = 0.0) -> Tensor:
    r"""ZCA whitening that lifts every eigenvalue to :math:`\theta = c \, \lambda_{max}` ("ZCAM").

    .. math:: W = D \, \max(\Lambda, \max(\theta, \epsilon))^{-1/2} D^T

    The gradient of a lifted eigenvalue goes, times c, to the largest one; where :math:`\theta < \epsilon` it is none.

    The published backward pass bounds :math:`1 / (\lambda_i - \lambda_j)` by a number K. The divided differences here
    (see :func:`zca_inverse_sqrt`) hold no such quotient, and are what it tends to as K grows.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).
        threshold: c, the inverse of the largest condition number that is let through.
        eps: the least eigenvalue, in units of variance.

    Returns:
        The whitening matrices, (..., g, g).

    Raises:
        NonFiniteCovarianceError: ``sigma`` holds NaN or infinity.

    Source: On Batch Orthogonalization Layers, Algorithms 5-6, version "max"; c = 1/100 is its choice for MNIST.
    """

    def rule(eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
        largest = torch.full_like(eigenvalues[..., :1], eigenvalues.shape[-1] - 1, dtype=torch.long)
        slope = torch.zeros_like(eigenvalues).scatter(-1, largest, threshold)
        return threshold * eigenvalues[..., -1:], slope

    return _spectral(sigma, "zca_max", rule, eps)


def zca_entropy_inverse_sqrt(sigma: Tensor, eps: float = 0.0) -> Tensor:
    r"""ZCA whitening that lifts the eigenvalues beyond the effective rank to the eigenvalue at it ("ZCAE").

    .. math::
        p = \lambda / \mathbf{1}^T \lambda, \quad R = e^{-p^T \ln p}, \quad \theta = \lambda_{[R]}, \quad
        W = D \, \max(\Lambda, \max(\theta, \epsilon))^{-1/2} D^T

    with eigenvalues in descending order and [R] the nearest integer. The gradient of a lifted eigenvalue goes to
    :math:`\lambda_{[R]}`; where :math:`\theta < \epsilon` it is none. About K see :func:`zca_max_inverse_sqrt`.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).
        eps: the least eigenvalue, in units of variance.

    Returns:
        The whitening matrices, (..., g, g).

    Raises:
        NonFiniteCovarianceError: ``sigma`` holds NaN or infinity.

    Source: On Batch Orthogonalization Layers, section V and Algorithms 5-6, version "entropy".
    """

    def rule(eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
        size = eigenvalues.shape[-1]
        positive = eigenvalues.clamp_min(0)
        p = positive / positive.sum(-1, keepdim=True).clamp_min(torch.finfo(eigenvalues.dtype).tiny)
        rank = (-torch.special.xlogy(p, p).sum(-1, keepdim=True)).exp().round().nan_to_num(1).clamp(1, size).long()
        place = size - rank  # eigenvalues ascend
        slope = torch.zeros_like(eigenvalues).scatter(-1, place, 1.0)
        return eigenvalues.gather(-1, place), slope

    return _spectral(sigma, "zca_entropy", rule, eps)


def pca_inverse_sqrt(sigma: Tensor) -> Tensor:
    r""":math:`\Lambda^{-1/2} D^T` by eigendecomposition (PCA whitening), eigenvalues in descending order.

    .. warning::
        Not for training networks. Its output axes are the principal directions, in the order of their variance: from
        one batch to the next two of them may swap ("stochastic axis swapping"), and the layers above see their inputs
        permuted. It is here so that this can be shown. A running average of such matrices is of as little use.

    The first element of every eigenvector is positive. The backward pass holds :math:`1 / (\lambda_i - \lambda_j)`,
    for PCA has no derivative at equal eigenvalues; 0 is taken for it where they cannot be told apart.

    Args:
        sigma: symmetric positive semi-definite matrices, (..., g, g).

    Returns:
        The whitening matrices, (..., g, g).

    Raises:
        NonFiniteCovarianceError: ``sigma`` holds NaN or infinity.

    Source: Decorrelated Batch Normalization, section 3.1.
    """
    return _PCAInverseSqrt.apply(sigma) if sigma.requires_grad else _pca_forward(sigma)[0]


#: ascending eigenvalues (..., g) -> the threshold (..., 1) and its derivative by each of them (..., g)
_Rule = Callable[[Tensor], tuple[Tensor, Tensor]]


def _eigh(sigma: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if not _is_symbolic() and not torch.isfinite(sigma).all():  # eigh notices it for some sizes only
        raise NonFiniteCovarianceError(
            f"{name} whitening: the covariance matrix holds NaN or infinity; check the input"
        )
    return torch.linalg.eigh(sigma)


def _is_symbolic() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def _rounding(eigenvalues: Tensor) -> Tensor:
    """What eigenvalues are not known to, (..., 1): rounding of the largest, the last, times their number."""
    return eigenvalues.shape[-1] * torch.finfo(eigenvalues.dtype).eps * eigenvalues[..., -1:].abs()


def _inv_sqrt(values: Tensor) -> Tensor:
    alive = values > _rounding(values).clamp_min(zero_variance(values.dtype))
    return torch.where(alive, torch.where(alive, values, torch.ones_like(values)).rsqrt(), 0.0)


def _spectral(sigma: Tensor, name: str, rule: _Rule | None, eps: float) -> Tensor:
    if sigma.requires_grad:
        return _SpectralInverseSqrt.apply(sigma, name, rule, eps)
    return _spectral_forward(sigma, name, rule, eps)[0]


def _spectral_forward(sigma: Tensor, name: str, rule: _Rule | None, eps: float) -> tuple[Tensor, ...]:
    """Returns W, D and r; under a rule also the eigenvalues, which of them it lifts, to what, and its derivative."""
    eigenvalues, d = _eigh(sigma, name)
    if rule is None:
        r = _inv_sqrt(eigenvalues)
        under_rule: tuple[Tensor, ...] = ()
    else:
        theta, slope = rule(eigenvalues)
        follows = theta >= eps
        theta, slope = torch.where(follows, theta, eps), torch.where(follows, slope, 0.0)
        lifted = eigenvalues < theta
        r = _inv_sqrt(torch.where(lifted, theta, eigenvalues))
        under_rule = eigenvalues, lifted, theta, slope
    return (d * r[..., None, :]) @ d.mT, d, r, *under_rule


class _SpectralInverseSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sigma: Tensor, name: str, rule: _Rule | None, eps: float) -> Tensor:
        whitening, *saved = _spectral_forward(sigma, name, rule, eps)
        ctx.save_for_backward(*saved)
        return whitening

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        d, r, *under_rule = ctx.saved_tensors
        ri, rj = r[..., :, None], r[..., None, :]
        total = ri + rj
        projected = d.mT @ (0.5 * (grad + grad.mT)) @ d
        # with r = lambda^{-1/2} the divided difference is -r_i^2 r_j^2 / (r_i + r_j); in this order nothing underflows
        difference = ri * rj / torch.where(total > 0, total, torch.ones_like(total))
        inner = -(ri * projected * rj) * difference
        if under_rule:
            inner = _through_threshold(inner, *under_rule)
        return d @ inner @ d.mT, None, None, None


def _through_threshold(inner: Tensor, eigenvalues: Tensor, lifted: Tensor, theta: Tensor, slope: Tensor) -> Tensor:
    """Turns the gradient by :math:`D \\hat\\Lambda D^T`, in the basis D, into that by :math:`D \\Lambda D^T`."""
    values = torch.where(lifted, theta, eigenvalues)
    lifted_i, lifted_j = lifted[..., :, None], lifted[..., None, :]
    # a rotation of D changes the lifted matrix by the gap of the lifted eigenvalues, the other by that of the others
    gap = eigenvalues[..., :, None] - eigenvalues[..., None, :]
    lifted_gap = values[..., :, None] - values[..., None, :]
    ratio = torch.where(lifted_i ^ lifted_j, lifted_gap / gap, torch.where(lifted_i, 0.0, 1.0))
    lost = torch.where(lifted, inner.diagonal(dim1=-2, dim2=-1), 0.0).sum(-1, keepdim=True)
    return inner * ratio + torch.diag_embed(slope * lost)


def _pca_forward(sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns W, the eigenvalues, D and r, eigenvalues ascending but in W."""
    eigenvalues, d = _eigh(sigma, "pca")
    d = d * torch.where(d[..., :1, :] < 0, -1.0, 1.0)
    r = _inv_sqrt(eigenvalues)
    return (d * r[..., None, :]).mT.flip(-2), eigenvalues, d, r


class _PCAInverseSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sigma: Tensor) -> Tensor:
        whitening, *saved = _pca_forward(sigma)
        ctx.save_for_backward(*saved)
        return whitening

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        eigenvalues, d, r = ctx.saved_tensors
        # of dL = sum_ij h_ij (dr_i delta_ij + r_i (D^T dD)_ji) with (D^T dD)_ji = (D^T dSigma D)_ji / (l_i - l_j)
        h = grad.flip(-2) @ d
        scaled = r[..., :, None] * h
        gap = eigenvalues[..., :, None] - eigenvalues[..., None, :]
        apart = gap.abs() > _rounding(eigenvalues)[..., None]
        inner = 0.5 * torch.where(apart, (scaled - scaled.mT) / gap, 0.0)
        inner = inner - torch.diag_embed(0.5 * r.pow(3) * h.diagonal(dim1=-2, dim2=-1))
        return d @ inner @ d.mT
