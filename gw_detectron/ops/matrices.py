"""Batches of matrices, (..., g, g): identity, diagonal, and products with diagonal matrices."""

import torch
from torch import Tensor


def identity_like(matrices: Tensor) -> Tensor:
    """Return the identity (g, g) in dtype and device of ``matrices``."""
    return torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)


def diagonal(matrices: Tensor) -> Tensor:
    """View the diagonals, (..., g)."""
    return matrices.diagonal(dim1=-2, dim2=-1)


def diagonal_values(matrices: Tensor) -> Tensor:
    """Return the diagonals, (..., g), by a slice: CoreML has no diagonals of a batch."""
    size = matrices.shape[-1]
    return matrices.flatten(-2)[..., :: size + 1]


def scale_rows(matrices: Tensor, factors: Tensor) -> Tensor:
    """Return diag(factors) A for factors (..., g)."""
    return factors[..., :, None] * matrices


def scale_columns(matrices: Tensor, factors: Tensor) -> Tensor:
    """Return A diag(factors) for factors (..., g)."""
    return matrices * factors[..., None, :]


def inverse_root(values: Tensor, alive: Tensor) -> Tensor:
    """Return 1 / sqrt(values) where ``alive``, else 0, with finite gradients."""
    return torch.where(alive, torch.where(alive, values, 1.0).rsqrt(), 0.0)
