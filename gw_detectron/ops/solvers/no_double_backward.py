"""Whitening matrices with a gradient, but without second derivatives."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def whitening_matrix(
    sigma: Tensor,
    least: float | Tensor,
    solve: Callable[[Tensor, float | Tensor], tuple[Tensor, ...]],
    pull_back: Callable[..., Tensor],
) -> Tensor:
    """Compute whitening matrices whose backward pass is written by hand.

    ``solve`` returns the matrices and other tensors; ``pull_back`` takes the gradient and all of these, and returns
    that of ``sigma``. ``least`` is not part of ``solve``, as vmap looks for tensors among arguments.
    """
    return (
        _FirstOrder.apply(sigma, least, solve, pull_back)[0]
        if sigma.requires_grad
        else solve(sigma, least)[0]
    )


class _FirstOrder(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        sigma: Tensor, least: Any, solve: Any, pull_back: Any
    ) -> tuple[Tensor, ...]:
        return solve(sigma, least)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        sigma, _, _, ctx.pull_back = inputs
        ctx.save_for_backward(sigma, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        sigma, *saved = ctx.saved_tensors
        with torch.no_grad():
            gradient = ctx.pull_back(grad, *saved)
        if torch.is_grad_enabled():  # create_graph=True
            gradient = _WithoutDerivative.apply(gradient, sigma, grad)
        return gradient, None, None, None


class _WithoutDerivative(torch.autograd.Function):
    """Return a gradient whose derivative by the tensors that it was computed from is an error.

    torch's ``once_differentiable`` forgets these sources: ``torch.autograd.grad`` by one of them would leave out this
    gradient in silence.
    """

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
