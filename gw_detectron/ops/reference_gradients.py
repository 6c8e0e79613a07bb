"""Gradients of an operator by its tensors, of which some are absent or need none."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .numerics import autocast_off


def reference_gradients(
    reference: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    dy: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of a reference by autograd; None where not needed.

    They have derivatives if gradients are enabled here (``create_graph=True``).

    Args:
        reference: computes y from the tensors.
        tensors: None where the operator has none.
        needed: whether each tensor needs its gradient.
        dy: the gradient of y.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), autocast_off(dy.device.type):
        # autograd stops at these aliases: x may be a function of weight (in a layer used twice), or
        # weight of x
        aliases: list[Any] = [
            tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors
        ]
        y = reference(*aliases)

        wanted = [
            alias for alias, is_needed in zip(aliases, needed, strict=True) if is_needed
        ]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph))
    return [next(found) if is_needed else None for is_needed in needed]


def needed_gradients(
    gradients: Iterable[Tensor], tensors: Iterable[Any], needed: Iterable[bool]
) -> list[Tensor | None]:
    """Return gradients in the dtypes of their tensors; None where not needed."""
    rows = zip(gradients, tensors, needed, strict=True)
    return [
        gradient.to(tensor.dtype) if is_needed else None
        for gradient, tensor, is_needed in rows
    ]
