"""Gradients that have no derivative of their own."""

from typing import Any

import torch
from torch import Tensor


def without_derivative(gradient: Tensor, *sources: Tensor) -> Tensor:
    """Return a gradient whose derivative by any of the tensors that it was computed from is an error.

    ``once_differentiable`` of torch forgets the sources, so that ``torch.autograd.grad`` by one of them leaves out this
    gradient without a word.
    """
    return _WithoutDerivative.apply(gradient, *sources) if torch.is_grad_enabled() else gradient


class _WithoutDerivative(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError(
            "solver: only 'newton' and 'standardize' have second derivatives. Fix: use one of them."
        )
