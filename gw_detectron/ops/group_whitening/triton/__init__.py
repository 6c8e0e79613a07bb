"""The triton backend: no more passes over activations than GroupNorm.

Shapes: ``N`` samples, ``C`` channels, ``g`` groups (the side of the covariance matrix), ``cpg = C / g``, ``P``
positions (the product of the spatial sizes), ``M = cpg * P``. Row r of a sample's matrix holds the channels
``r * cpg + j``; a column is a pair (j, p). Statistics, whitening matrices and all sums are float32.

A program loops over tiles of all g rows and ``JB * PB`` columns (JB values of j, PB of p; powers of two, masked). Rows
are padded with zeros to a power of two, which changes no product. Programs write partial results, which are summed in a
fixed order afterwards, never with atomics: the same input gives the same bits.

Operands of the products over columns:

============  =========  ===========================================================================================
input         operands   why
============  =========  ===========================================================================================
float32       2 float16  float32's accuracy on tensor cores: a scaled operand is the sum of two float16, a product that
                         of three; two tf32 where no scale is known; one tf32 where the user allows it for matmuls
float16       the same   centered values have more digits than float16; one tf32 for covariance and grad_products
bfloat16      bfloat16   values are centered in float32, then rounded; the covariance itself is computed with tf32
============  =========  ===========================================================================================

Forward and backward take eight launches (nine for many samples), which ``launch.run_planned`` repeats with little host
time. For g > 64 or T > 8, torch's batched products solve the iteration. What is saved for backward, besides the
solution of Newton's iteration for a few samples, and the gradients by the products G_j are those of ``matmul.py``.

Source: Group Whitening supplement, Algorithms 1-2.
"""

import torch
from torch import Tensor

from ...checks import memory_format_of
from . import launch
from .gradients import apply_backward, grad_products, matrix_gradients
from .launch import supported as supported
from .newton import in_registers, newton, operands
from .tiles import INTERPRETED as INTERPRETED
from .whitening import apply, statistics

#: whitening matrices and operands of their tangents
Solution = tuple[Tensor, Tensor]
#: samples whose solutions are saved for backward. It takes 12 microseconds to repeat them, whatever their number.
_MOST_SOLUTIONS = 8


def solution_for(x: Tensor, groups: int, num_iters: int) -> Solution | None:
    """Return uninitialized tensors for what Newton's iteration hands from forward to backward, 0.25 MB a sample.

    None where it is cheaper to repeat the iteration: for many samples.
    """
    if not 0 < len(x) <= _MOST_SOLUTIONS or not in_registers(groups, num_iters):
        return None
    return torch.empty(
        (len(x), groups, groups), dtype=torch.float32, device=x.device
    ), operands(x, groups, num_iters)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    num_iters: int,
    eps: float,
    relu: bool,
    solution: Solution | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``matmul.forward``, and write the ``solution``."""
    y = torch.empty_like(x, memory_format=memory_format_of(x))
    x = launch.prepare(x)
    mean = torch.empty((len(x), groups), dtype=torch.float32, device=x.device)
    sigma = torch.empty((len(x), groups, groups), dtype=torch.float32, device=x.device)
    if x.numel() == 0:  # there is no column to average
        return y, mean.zero_(), sigma.zero_()
    weight, bias = _contiguous(weight), _contiguous(bias)

    def steps() -> None:
        statistics(x, groups, eps, mean, sigma)
        whitening, kept = solution or (launch.empty(x, *sigma.shape), None)
        newton(sigma, num_iters, whitening, kept)
        apply(x, mean, sigma, whitening, weight, bias, relu, y)

    key = (
        "forward",
        launch.layout_key(x, weight, bias),
        y.stride(),
        groups,
        num_iters,
        eps,
        relu,
    )
    tensors = x, weight, bias, y, mean, sigma, *(solution or ())
    launch.run_planned(key if in_registers(groups, num_iters) else None, tensors, steps)
    return y, mean, sigma


def backward(
    dy: Tensor,
    y: Tensor | None,
    x: Tensor,
    mean: Tensor,
    sigma: Tensor,
    weight: Tensor | None,
    num_iters: int,
    solution: Solution | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``matmul.backward``; ``solution`` is that of the forward pass."""
    dx = torch.empty_like(x, memory_format=memory_format_of(x))
    dweight = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    dbias = torch.empty_like(dweight)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    x, dy, weight, groups = (
        launch.prepare(x),
        launch.prepare(dy),
        _contiguous(weight),
        mean.shape[1],
    )
    if y is not None and y.stride() != dx.stride():
        y = torch.empty_like(dx).copy_(y)

    def steps() -> None:
        whitening, kept = solution or (launch.empty(x, *sigma.shape), None)
        products, grad, largest = grad_products(x, mean, dy, weight, y, dx)
        if solution is None and in_registers(groups, num_iters):
            kept = operands(x, groups, num_iters)
            newton(sigma, num_iters, whitening, kept)
        grad_sigma = matrix_gradients(
            products, whitening, dweight, dbias, sigma, grad, num_iters, kept
        )
        masked = dy if y is None else dx
        apply_backward(x, mean, sigma, masked, weight, whitening, grad_sigma, grad, largest, dx)

    key = "backward", launch.layout_key(x, dy, y, weight), dx.stride(), groups, num_iters
    tensors = x, dy, y, weight, mean, sigma, dx, dweight, dbias, *(solution or ())
    launch.run_planned(key if in_registers(groups, num_iters) else None, tensors, steps)
    return dx, dweight, dbias


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
