"""The equations of Group Whitening in plain torch, reference of the backends.

Shapes: ``N`` samples, ``C`` channels, ``g`` groups (the side of the covariance matrix),
``M = C / g * prod(spatial)`` columns per sample, over which its covariance is computed.
"""

import math

from torch import Tensor

from ..arguments import check_divides, check_integer
from ..numerics import autocast_off, compute_dtype, memory_format_of
from ..solvers import Solver


def effective_groups(num_channels: int, num_groups: int) -> int:
    """Return the number of groups g: ``num_groups``, capped at the channel count, which it must divide.

    Source: Group Whitening, section 5.1.1 ("we use the channel number if it is less than the group
        number").
    """
    check_integer("num_channels", num_channels, least=1, example=64)
    check_integer("num_groups", num_groups, least=1, example=64)
    groups = min(num_groups, num_channels)
    check_divides(groups, num_channels)
    return groups


def group_whiten_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    solver: Solver,
    relu: bool = False,
) -> Tensor:
    r"""Compute :func:`gw_detectron.layers.group_whiten` of checked arguments by its equations.

    .. math::
        X_G = \Pi(x; g) \in \mathbb{R}^{g \times M}, \quad
        \mu = \tfrac{1}{M} X_G \mathbf{1}, \quad X_C = X_G - \mu \mathbf{1}^T, \quad
        \Sigma = \tfrac{1}{M} X_C X_C^T + \epsilon I, \quad
        \hat{x} = \Pi^{-1}(\psi(\Sigma) X_C), \quad y = \gamma \hat{x} + \beta

    Source: Group Whitening, Eqs. 8-10, and its supplement, Algorithm 1.
    """
    if x.numel() == 0:
        return apply_affine(x, weight, bias, relu).to(x.dtype)

    n, channels, *spatial = x.shape
    # not -1: a trace may meet an empty batch
    columns = channels // groups * math.prod(spatial)
    with autocast_off(x.device.type):
        # reshape, not view: channels_last input is not laid out group by group
        x_g = x.to(compute_dtype(x)).reshape(n, groups, columns)
        x_c = x_g - x_g.mean(-1, keepdim=True)

        covariance = x_c @ x_c.mT / columns
        whitening = solver(covariance)  # which adds eps I

        x_hat = (whitening @ x_c).reshape(x.shape)
        y = apply_affine(x_hat, weight, bias, relu)

    return y.to(dtype=x.dtype, memory_format=memory_format_of(x))


def apply_affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> Tensor:
    """Apply scale and shift, each (C,) or None, and perhaps a ReLU to (N, C, *spatial)."""
    spatial = [1] * (x.dim() - 2)
    if weight is not None:
        scale = weight.to(x.dtype)
        x = x * scale.reshape(1, -1, *spatial)
    if bias is not None:
        shift = bias.to(x.dtype)
        x = x + shift.reshape(1, -1, *spatial)
    if relu:
        x = x.relu()
    return x
