r"""The matmul backend of mixed statistics: closed forms for activations, autograd for the g x g matrices.

Only the input and the statistics of each sample are saved for backward, which normalizes the input
again. With :math:`V = U - b \mu`, :math:`W = S^{-1/2}`, :math:`D = \gamma \, dL/dy` and
:math:`G = dL/dW = D V^T`,

.. math::
    dL/dU = W D + \tfrac{1}{M} (H + H^T) (U - \mu) + \tfrac{1}{M} h \mathbf{1}^T, \quad
    h = \partial_\mu - b W D \mathbf{1},

where H and :math:`\partial_\mu` are the gradients of :math:`\langle G, W(\Sigma, \mu) \rangle`.
"""

from typing import Any

import torch
from torch import Tensor

from .group_whitening import matmul
from .group_whitening.op import forced_backend
from .matrices import diagonal
from .mixed_statistics import (
    FixedNorm,
    Mixture,
    mix_whiten_reference,
    mixed_inverse_sqrt,
)
from .numerics import autocast_off, memory_format_of
from .reference_gradients import needed_gradients, reference_gradients
from .torch_private import is_batched, is_dispatched, needs_plain_operations


def mix_whiten(
    x: Tensor, norm: FixedNorm, mixture: Mixture, groups: int, num_iters: int
) -> Tensor:
    """Compute :func:`mix_whiten_reference`, in eager mode by closed forms."""
    if mixture.a > 0 and x.numel() > 0 and _is_plain_eager(x, norm.weight, norm.bias):
        return MixWhiten.apply(x, *norm, mixture, groups, num_iters)
    return mix_whiten_reference(x, norm, mixture, groups, num_iters)


def _is_plain_eager(*tensors: Tensor) -> bool:
    if torch.compiler.is_compiling() or needs_plain_operations():
        return False
    return forced_backend() != "reference" and not is_dispatched(*tensors)


class MixWhiten(torch.autograd.Function):
    """Whiten by mixed statistics; the arguments are x, the fields of FixedNorm, and three options."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        *fields, mixture, groups, num_iters = arguments
        norm = FixedNorm(*fields)
        memory_format = memory_format_of(x)
        with autocast_off(x.device.type):
            u, mean, sigma, large = _statistics(x, norm, groups)
            whitening = mixed_inverse_sqrt(mean, sigma, mixture, num_iters)

            y = torch.empty_like(u, dtype=x.dtype)
            center = mixture.b * mean - large
            matmul.apply_whitening(
                u, center, whitening, norm.weight, norm.bias, False, out=y
            )

        ctx.save_for_backward(x, *norm[:-1], mean, sigma, large)
        ctx.eps = norm.eps
        ctx.options = mixture, groups, num_iters
        return y.contiguous(memory_format=memory_format)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, running_mean, running_var, *statistics = ctx.saved_tensors
        norm = FixedNorm(weight, bias, running_mean, running_var, ctx.eps)
        tensors = x, weight, bias
        needed = ctx.needs_input_grad[:3]

        # create_graph=True, or vmap over dy
        if torch.is_grad_enabled() or is_batched(dy):

            def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                parameters = norm._replace(weight=weight, bias=bias)
                return mix_whiten_reference(x, parameters, *ctx.options)

            gradients = reference_gradients(reference, tensors, needed, dy)
        else:
            with autocast_off(x.device.type):
                results = _gradients(dy, x, norm, *statistics, *ctx.options)
            gradients = needed_gradients(results, tensors, needed)
        return *gradients, None, None, None, None, None, None


def _statistics(
    x: Tensor, norm: FixedNorm, groups: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return U less its large means, its mean and covariance, and these large means, (N, g)."""
    u = norm.normalize(matmul.prepare(x))
    mean, sigma = matmul.statistics(u, groups)
    large = matmul.large_means(mean, diagonal(sigma))
    if large is None:
        return u, mean, sigma, torch.zeros_like(mean)

    u = matmul.subtract(u, large)
    rest, sigma = matmul.statistics(u, groups)
    return u, rest + large, sigma, large


def _gradients(
    dy: Tensor,
    x: Tensor,
    norm: FixedNorm,
    mean: Tensor,
    sigma: Tensor,
    large: Tensor,
    mixture: Mixture,
    groups: int,
    num_iters: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias."""
    memory_format = memory_format_of(x)
    u = norm.normalize(matmul.prepare(x))
    if large.any():
        u = matmul.subtract(u, large)
    dy = matmul.prepare(dy)
    du = torch.empty_like(u)

    center = mixture.b * mean - large
    products, sums = matmul.grad_products(u, center, dy, groups, None, out=du)
    scale = matmul.per_channel(norm.weight, mean).mT[:, None]
    grad_whitening = matmul.scaled_sum(products, scale[..., None])

    with torch.enable_grad():
        statistics = mean.detach().requires_grad_(), sigma.detach().requires_grad_()
        whitening = mixed_inverse_sqrt(*statistics, mixture, num_iters)
        grad_mean, grad_sigma = torch.autograd.grad(
            whitening, statistics, grad_whitening
        )
    whitening = whitening.detach()
    dweight = (products * whitening).sum((1, 3))
    dbias = sums.sum(1)

    columns = u.numel() // mean.numel()
    grad_sum = (sums * scale).sum(0)[..., None]
    grad_mean = grad_mean[..., None] - mixture.b * whitening @ grad_sum
    matmul.apply_backward(
        u,
        mean - large,
        dy,
        norm.weight,
        whitening,
        (grad_sigma + grad_sigma.mT) / columns,
        -grad_mean / columns,
        out=du,
    )
    dx = du * norm.scale(du)
    dx = dx.contiguous(memory_format=memory_format)
    return dx, dweight.mT.flatten(), dbias.mT.flatten()
