r"""Norms of batch-normalized input whose statistics are mixed with those of each image.

BN's running statistics m, v normalize the input to :math:`U = (x - m) / \sqrt{v + \epsilon}`. Over the
data that BN was trained on, a channel of U has mean 0 and variance 1; on an image, it has the mean
:math:`\mu` and the covariance :math:`\Sigma`. Two numbers from 0 (BN's) to 1 (the image's) mix them:
b for the mean, a for the covariance,

.. math::
    y = \gamma \, S^{-1/2} (U - b \mu) + \beta, \quad
    S = (1 - a) I + a \Sigma + b (1 - b) \mu \mu^T .

With a = b, S is the covariance of a mixture of both distributions (law of total variance). a = b = 0 is
BN in evaluation. a = b = 1 is Group Whitening of U without eps.

Shapes: ``N`` samples, ``C`` channels, ``g`` groups, ``M = C / g * prod(spatial)`` columns, as in
:mod:`gw_detectron.ops.group_whitening.reference`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .group_whitening.reference import apply_affine
from .matrices import identity_like
from .numerics import (
    autocast_off,
    compute_dtype,
    memory_format_of,
    zero_variance_threshold,
)

#: least (1 - a) / t of the solver, which bounds the condition that it is made for
_LEAST_BOUND = 1e-4


class Mixture(NamedTuple):
    """How much of an image's statistics is in a norm: a of its covariance, b of its mean, each from 0 to 1."""

    a: float
    b: float


class FixedNorm(NamedTuple):
    """What BN in evaluation computes with: four tensors (C,), and eps."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    eps: float

    def apply(self, x: Tensor) -> Tensor:
        """Compute BN in evaluation, in the dtype of x."""
        dtype = compute_dtype(x)
        y = F.batch_norm(
            x.to(dtype),
            self.running_mean.to(dtype),
            self.running_var.to(dtype),
            self.weight.to(dtype),
            self.bias.to(dtype),
            training=False,
            eps=self.eps,
        )
        return y.to(x.dtype)

    def scale(self, like: Tensor) -> Tensor:
        """Return 1 / sqrt(v + eps) of each channel, to multiply a tensor with."""
        scale = (self.running_var.to(like.dtype) + self.eps).rsqrt()
        return scale.reshape([1, -1] + [1] * (like.dim() - 2))

    def normalize(self, x: Tensor) -> Tensor:
        """Return U of (N, C, *spatial), without scale and shift, in the compute dtype."""
        x = x.to(compute_dtype(x))
        scale = self.scale(x)
        shift = -self.running_mean.to(x.dtype).reshape(scale.shape) * scale
        return torch.addcmul(shift, x, scale)


def mix_whiten_reference(
    x: Tensor, norm: FixedNorm, mixture: Mixture, groups: int, num_iters: int
) -> Tensor:
    """Whiten (N, C, *spatial) by BN's statistics mixed with each sample's covariance.

    The output has the shape, dtype and memory format of ``x``. Statistics and solver run in float32
    (float64 for float64 input), also under autocast.
    """
    if mixture == (0, 0) or x.numel() == 0:
        return norm.apply(x)

    with autocast_off(x.device.type):
        u = norm.normalize(x)
        # not len(x): a trace would fix the batch size
        columns = u.reshape(x.shape[0], groups, -1)
        mean = columns.mean(-1)
        covariance = None
        if mixture.a > 0:
            centered = columns - mean[..., None]
            covariance = centered @ centered.mT / columns.shape[-1]

        whitening = mixed_inverse_sqrt(mean, covariance, mixture, num_iters)
        shifted = columns - mixture.b * mean[..., None]
        u_hat = (whitening @ shifted).reshape(x.shape)
        y = apply_affine(u_hat, norm.weight, norm.bias, relu=False)
    return y.to(dtype=x.dtype, memory_format=memory_format_of(x))


def mix_standardize(x: Tensor, norm: FixedNorm, mixture: Mixture) -> Tensor:
    """Normalize (N, C, *spatial) by BN's statistics mixed with each channel's own: S is diagonal."""
    if mixture == (0, 0) or x.numel() == 0:
        return norm.apply(x)

    shape = [*x.shape[:2]] + [1] * (x.dim() - 2)
    with autocast_off(x.device.type):
        x_wide = x.to(compute_dtype(x))
        scale = norm.scale(x_wide).flatten()
        rows = x_wide.reshape(*x.shape[:2], -1)
        variance, mean = torch.var_mean(rows, -1, correction=0)
        mean = (mean - norm.running_mean) * scale
        inverse_std = mixed_inverse_std(mean, variance * scale.square(), mixture)

        # one scale and shift for each channel of each sample
        slope = norm.weight * inverse_std
        shift = norm.bias - slope * (norm.running_mean * scale + mixture.b * mean)
        slope = slope * scale
        y = torch.addcmul(shift.reshape(shape), x_wide, slope.reshape(shape))
    return y.to(dtype=x.dtype, memory_format=memory_format_of(x))


def mixed_inverse_std(mean: Tensor, variance: Tensor, mixture: Mixture) -> Tensor:
    """Return the diagonal of S^(-1/2) for a diagonal covariance; 0 for a channel without variance."""
    within = (1 - mixture.a) + mixture.a * variance
    s = within + _between(mixture) * mean.square()
    is_zero = s <= zero_variance_threshold(s.dtype)
    return s.masked_fill(is_zero, torch.inf).rsqrt()


def mixed_inverse_sqrt(
    mean: Tensor, covariance: Tensor | None, mixture: Mixture, num_iters: int
) -> Tensor:
    """Approximate S^(-1/2), (N, g, g), by ``num_iters`` steps; exactly if a is 0.

    Args:
        mean: of an image's normalized input, (N, g).
        covariance: (N, g, g); not read if a is 0.
        mixture: a and b.
        num_iters: steps of :func:`bounded_inverse_sqrt`.
    """
    between = _between(mixture) * mean[..., :, None] * mean[..., None, :]
    if mixture.a == 0 or covariance is None:
        return _rank_one_inverse_sqrt(mean, between)
    return bounded_inverse_sqrt(
        mixture.a * covariance + between, 1 - mixture.a, num_iters
    )


def _between(mixture: Mixture) -> float:
    """Return the weight of the variance between the means of both distributions.

    It is no property: torch.compile of torch 2.7 traces none of a NamedTuple.
    """
    return mixture.b * (1 - mixture.b)


def _rank_one_inverse_sqrt(mean: Tensor, between: Tensor) -> Tensor:
    r"""Return :math:`(I + c \mu \mu^T)^{-1/2} = I - c \mu \mu^T / (r (1 + r))`, :math:`r^2 = 1 + c |\mu|^2`."""
    trace = between.diagonal(dim1=-2, dim2=-1).sum(-1)
    root = (1 + trace).sqrt()[..., None, None]
    return identity_like(between) - between / (root * (1 + root))


def bounded_inverse_sqrt(e: Tensor, bound: float, num_iters: int) -> Tensor:
    r"""Approximate :math:`W = (\ell I + E)^{-1/2}` by a coupled Newton-Schulz iteration with scaling.

    Eigenvalues of S are in :math:`[\ell, t]`, :math:`t = \ell + \|E\|_F`. Each step is scaled by
    :math:`\alpha`, which maps the least possible root s of an eigenvalue of S / t as near to 1 as a
    cubic can:

    .. math::
        Y_0 = S / t, \quad Z_0 = I, \quad s_0 = \sqrt{\ell / t}, \quad
        \alpha = \sqrt{3 / (1 + s + s^2)}, \\
        R = \tfrac{\alpha}{2} (3 I - \alpha^2 Z Y), \quad Y \leftarrow Y R, \quad Z \leftarrow R Z, \quad
        s \leftarrow \tfrac{\alpha}{2} s (3 - \alpha^2 s^2), \quad W = \frac{2}{(1 + s) \sqrt t} Z .

    The steps keep all roots between s and 1; the last factor centers them. The relative error is at
    most (1 - s) / (1 + s): 0.06 % after six steps for :math:`t / \ell` = 2000, 2 % for 10,000; 3 % and 16 %
    after five. :math:`E = 0` gives :math:`I / \sqrt \ell` up to rounding.

    Args:
        e: symmetric positive semi-definite matrices E, (..., g, g).
        bound: :math:`\ell`, from 0 to 1. Below t / 10,000, the iteration is made for t / 10,000.
        num_iters: number of steps.

    Source: Higham, Functions of Matrices (2008), section 6.3; scaling as in Chen and Chow, "A stable
        scaling of Newton-Schulz for improving the sign function computation" (2014).
    """
    size = torch.linalg.vector_norm(e, dim=(-2, -1), keepdim=True)
    t = bound + size
    is_zero = t <= zero_variance_threshold(e.dtype)
    t = t.masked_fill(is_zero, torch.inf)

    identity = identity_like(e)
    y = (bound * identity + e) / t
    s = (bound / t).clamp_min(_LEAST_BOUND).sqrt()
    z = None
    for step in range(num_iters):
        alpha = (3 / (1 + s + s * s)).sqrt()
        product = y if z is None else z @ y
        r = 1.5 * alpha * identity - 0.5 * alpha**3 * product
        z = r if z is None else r @ z
        if step < num_iters - 1:
            y = y @ r
        s = 0.5 * alpha * s * (3 - alpha * alpha * s * s)

    if z is None:  # without any step
        z = identity.expand_as(e)
    return z * (2 / ((1 + s) * t.sqrt()))
