r"""Whitening matrices by eigendecomposition: ZCA, its two thresholded versions, and PCA.

With :math:`\Sigma = D \Lambda D^T`, ZCA is :math:`W = D \, r(\Lambda) D^T` and PCA
:math:`W = r(\Lambda) D^T`, where :math:`r(\lambda) = \lambda^{-1/2}`, and 0 for an eigenvalue that is
zero up to rounding.

All functions map symmetric positive semi-definite matrices ``sigma`` (..., g, g) to matrices of
this shape, and raise NonFiniteError for NaN or infinity. ``least``, a number or (..., 1), is a lower
bound of the eigenvalues: the eps that sigma includes. Rounding moves eigenvalues by about
:math:`u \lambda_{max}`, where u is the unit roundoff. With ``least`` at or above that, the matrix is
regular: smaller computed eigenvalues are raised to ``least``, and none counts as zero. Below that,
eps is lost to rounding.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...errors import NonFiniteError
from ..matrices import diagonal, inverse_root, scale_columns, scale_rows
from ..numerics import rounding_floor
from ..torch_private import needs_plain_operations
from .no_double_backward import whitening_matrix


def zca_inverse_sqrt(sigma: Tensor, *, least: float | Tensor = 0.0) -> Tensor:
    r"""Compute :math:`\Sigma^{-1/2} = D \Lambda^{-1/2} D^T` (ZCA whitening).

    The backward pass uses the divided differences of :math:`\lambda^{-1/2}`,

    .. math::
        \frac{\lambda_i^{-1/2} - \lambda_j^{-1/2}}{\lambda_i - \lambda_j}
        = \frac{-1}{\sqrt{\lambda_i} \sqrt{\lambda_j} (\sqrt{\lambda_i} + \sqrt{\lambda_j})} ,

    which equals the published backward pass and, unlike its :math:`1 / (\lambda_i - \lambda_j)`, is
    finite for equal eigenvalues. Eigenvalues that are zero up to rounding count as zero variance.

    Source: Group Whitening supplement, Eqs. 1-3; Decorrelated Batch Normalization, Eqs. 4-6.
    """
    solve = partial(_spectral_forward, name="zca")
    return whitening_matrix(sigma, least, solve, _spectral_backward)


def zca_max_inverse_sqrt(
    sigma: Tensor,
    threshold: float = 0.01,
    eps: float = 0.0,
    *,
    least: float | Tensor = 0.0,
) -> Tensor:
    r"""Raise small eigenvalues to a fraction of the largest, then whiten (ZCAM).

    .. math:: W = D \, \max(\Lambda, \max(\theta, \epsilon))^{-1/2} D^T, \quad \theta = c \, \lambda_{max}

    The gradient of a raised eigenvalue goes, times c, to the largest one. Where
    :math:`\theta < \epsilon` it is zero.

    The published backward pass bounds :math:`1 / (\lambda_i - \lambda_j)` by a number K. The divided
    differences here (see :func:`zca_inverse_sqrt`) contain no such quotient; they are the limit of
    the published pass as K grows.

    Args:
        threshold: c, the inverse of the largest allowed condition number.
        eps: the smallest eigenvalue after raising, in units of variance.

    Source: On Batch Orthogonalization Layers, Algorithms 5-6, version "max"; c = 1/100 is its choice
        for MNIST.
    """

    def rule(eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
        last = eigenvalues.shape[-1] - 1
        place = torch.full_like(eigenvalues[..., :1], last, dtype=torch.long)
        slope = torch.zeros_like(eigenvalues).scatter(-1, place, threshold)
        return threshold * eigenvalues[..., -1:], slope

    solve = partial(_spectral_forward, name="zca_max", rule=rule, eps=eps)
    return whitening_matrix(sigma, least, solve, _spectral_backward)


def zca_entropy_inverse_sqrt(
    sigma: Tensor, eps: float = 0.0, *, least: float | Tensor = 0.0
) -> Tensor:
    r"""Raise eigenvalues beyond the effective rank, then whiten (ZCAE).

    .. math::
        p = \lambda / \mathbf{1}^T \lambda, \quad R = e^{-p^T \ln p}, \quad \theta = \lambda_{[R]}, \quad
        W = D \, \max(\Lambda, \max(\theta, \epsilon))^{-1/2} D^T

    with eigenvalues in descending order and [R] the nearest integer. The gradient of a raised
    eigenvalue goes to :math:`\lambda_{[R]}`. Where :math:`\theta < \epsilon` it is zero. For K see
    :func:`zca_max_inverse_sqrt`.

    Source: On Batch Orthogonalization Layers, section V and Algorithms 5-6, version "entropy".
    """

    def rule(eigenvalues: Tensor) -> tuple[Tensor, Tensor]:
        size = eigenvalues.shape[-1]
        positive = eigenvalues.clamp_min(0)
        total = positive.sum(-1, keepdim=True)
        p = positive / total.clamp_min(torch.finfo(eigenvalues.dtype).tiny)

        entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
        rank = entropy.exp().round().nan_to_num(1).clamp(1, size).long()

        place = size - rank  # eigenvalues ascend
        slope = torch.zeros_like(eigenvalues).scatter(-1, place, 1.0)
        return eigenvalues.gather(-1, place), slope

    solve = partial(_spectral_forward, name="zca_entropy", rule=rule, eps=eps)
    return whitening_matrix(sigma, least, solve, _spectral_backward)


def pca_inverse_sqrt(sigma: Tensor, *, least: float | Tensor = 0.0) -> Tensor:
    r"""Compute :math:`\Lambda^{-1/2} D^T` (PCA whitening), eigenvalues in descending order.

    Not for training networks; it is here to show why: two axes of similar variance may swap from one
    batch to the next ("stochastic axis swapping"), which permutes the input of the next layer.

    The first element of every eigenvector is positive. PCA has no derivative at equal eigenvalues:
    the backward pass contains :math:`1 / (\lambda_i - \lambda_j)`, which is replaced by 0 where the
    two are equal up to rounding.

    Source: Decorrelated Batch Normalization, section 3.1.
    """
    return whitening_matrix(sigma, least, _pca_forward, _pca_backward)


#: ascending eigenvalues (..., g) -> threshold (..., 1) and its derivative by each eigenvalue (..., g)
_Rule = Callable[[Tensor], tuple[Tensor, Tensor]]


def _eigh(sigma: Tensor, name: str, least: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return ascending eigenvalues of at least ``least``, and eigenvectors."""
    symbolic = (
        torch.compiler.is_compiling() or sigma.is_meta or needs_plain_operations()
    )
    # eigh raises for NaN in matrices of some sizes only
    if not symbolic and not torch.isfinite(sigma).all():
        raise NonFiniteError(
            f"solver={name}: the covariance matrix holds NaN or infinity. "
            "Fix: check the input of the layer."
        )
    eigenvalues, d = torch.linalg.eigh(sigma)
    return eigenvalues.clamp_min(least), d


def _inv_sqrt(values: Tensor, least: float | Tensor) -> Tensor:
    """Return the inverse square roots of ascending eigenvalues; 0 for those that are zero up to rounding."""
    return inverse_root(values, values > _floor(values, least))


def _floor(eigenvalues: Tensor, least: float | Tensor = 0.0) -> Tensor:
    size = eigenvalues.shape[-1]
    largest = eigenvalues[..., -1:]
    return rounding_floor(largest, size, least)


def _spectral_forward(
    sigma: Tensor,
    least: float | Tensor,
    name: str,
    rule: _Rule | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, ...]:
    """Return W, D, r and, with a rule, the eigenvalues, the mask of raised ones, threshold and slope."""
    eigenvalues, d = _eigh(sigma, name, least)
    if rule is None:
        r = _inv_sqrt(eigenvalues, least)
        w = scale_columns(d, r) @ d.mT
        return w, d, r

    theta, slope = rule(eigenvalues)
    follows = theta >= eps
    theta = torch.where(follows, theta, eps)
    slope = torch.where(follows, slope, 0.0)
    raised = eigenvalues < theta

    r = _inv_sqrt(torch.where(raised, theta, eigenvalues), least)
    w = scale_columns(d, r) @ d.mT
    return w, d, r, eigenvalues, raised, theta, slope


def _spectral_backward(
    grad: Tensor, _w: Tensor, d: Tensor, r: Tensor, *rule_tensors: Tensor
) -> Tensor:
    r"""Return :math:`D (K \circ D^T G D) D^T` for the symmetric part G of ``grad``.

    K has the divided differences of the function that makes W of the eigenvalues,
    :math:`-r_i^2 r_j^2 / (r_i + r_j)` for :math:`r = \lambda^{-1/2}`.
    """
    symmetric = 0.5 * (grad + grad.mT)
    projected = d.mT @ symmetric @ d
    r_i = r[..., :, None]
    r_j = r[..., None, :]
    total = r_i + r_j

    divisor = torch.where(total > 0, total, 1.0)

    # in this order nothing underflows
    difference = r_i * r_j / divisor
    inner = -(r_i * projected * r_j) * difference

    if rule_tensors:
        inner = _through_threshold(inner, *rule_tensors)
    return d @ inner @ d.mT


def _through_threshold(
    inner: Tensor, eigenvalues: Tensor, raised: Tensor, theta: Tensor, slope: Tensor
) -> Tensor:
    """Change the gradient by lifted eigenvalues into that by eigenvalues.

    A rotation of D changes either matrix in proportion to the gaps of its own eigenvalues.
    """
    lifted = torch.where(raised, theta, eigenvalues)
    raised_i = raised[..., :, None]
    raised_j = raised[..., None, :]
    quotient = _gaps(lifted) / _gaps(eigenvalues)
    ratio = torch.where(raised_i, 0.0, 1.0)
    ratio = torch.where(raised_i ^ raised_j, quotient, ratio)

    lost = torch.where(raised, diagonal(inner), 0.0)
    lost = lost.sum(-1, keepdim=True)
    return inner * ratio + torch.diag_embed(slope * lost)


def _gaps(eigenvalues: Tensor) -> Tensor:
    """Return all differences of eigenvalues."""
    return eigenvalues[..., :, None] - eigenvalues[..., None, :]


def _pca_forward(
    sigma: Tensor, least: float | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W, ascending eigenvalues, D and r; rows of W descend."""
    eigenvalues, d = _eigh(sigma, "pca", least)
    first = d[..., :1, :]
    d = d * torch.where(first < 0, -1.0, 1.0)
    r = _inv_sqrt(eigenvalues, least)
    w = scale_columns(d, r).mT.flip(-2)
    return w, eigenvalues, d, r


def _pca_backward(
    grad: Tensor, _w: Tensor, eigenvalues: Tensor, d: Tensor, r: Tensor
) -> Tensor:
    r"""Return dL/dSigma of

    .. math::
        dL = \sum_{ij} h_{ij} (dr_i \delta_{ij} + r_i (D^T dD)_{ji}), \quad
        (D^T dD)_{ji} = (D^T d\Sigma D)_{ji} / (\lambda_i - \lambda_j)
    """
    h = grad.flip(-2) @ d
    scaled = scale_rows(h, r)
    gap = _gaps(eigenvalues)

    apart = gap.abs() > _floor(eigenvalues)[..., None]
    quotient = (scaled - scaled.mT) / gap
    inner = 0.5 * torch.where(apart, quotient, 0.0)

    of_eigenvalues = 0.5 * r.pow(3) * diagonal(h)
    inner = inner - torch.diag_embed(of_eigenvalues)
    return d @ inner @ d.mT
