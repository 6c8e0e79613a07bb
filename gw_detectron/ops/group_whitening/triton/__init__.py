"""The triton backend: no more passes over activations than GroupNorm.

Shapes: ``N`` samples, ``C`` channels, ``g`` groups (the side of the covariance matrix),
``cpg = C / g``, ``P`` positions (the product of the spatial sizes), ``M = cpg * P``. Row r of a
sample's matrix holds the channels ``r * cpg + j``; a column is a pair (j, p). Statistics, whitening
matrices and all sums are float32.

A program loops over tiles of all g rows and ``JB * PB`` columns (JB values of j, PB of p; powers of
two, masked). Rows are padded with zeros to a power of two, which changes no product. Programs write
partial results, which are summed in a fixed order afterwards, never with atomics: the same input
gives the same bits.

Operands of the products over columns:

============  =========  ==========================================================================
input         operands   why
============  =========  ==========================================================================
float32       2 float16  float32's accuracy on tensor cores: a scaled operand is the sum of two
                         float16, a product that of three; two tf32 where no scale is known; one
                         tf32 where the user allows it for matmuls
float16       the same   centered values have more digits than float16; one tf32 for covariance and
                         grad_products
bfloat16      bfloat16   values are centered in float32, then rounded; the covariance itself is
                         computed with tf32
============  =========  ==========================================================================

Forward and backward take eight launches (nine for many samples), which ``plans.run_planned``
repeats with little host time. For g > 64 or T > 8, torch's batched products solve the iteration.
What is saved for backward, besides the solution of Newton's iteration for a few samples, and the
gradients by the products G_j are those of ``matmul.py``.

``whitening.py``, ``newton.py`` and ``gradients.py`` have the kernels and the functions that launch
them; ``device_functions.py`` has the functions that kernels share. ``support.py`` says which inputs
they take, ``tiling.py`` divides an input among programs, and ``plans.py`` launches.

Source: Group Whitening supplement, Algorithms 1-2.
"""

import torch
from torch import Tensor

from ...numerics import memory_format_of
from . import plans
from .device_functions import INTERPRETED as INTERPRETED
from .gradients import apply_backward, grad_products, matrix_gradients
from .newton import in_registers, newton, operands
from .support import supported as supported
from .tiling import prepare
from .whitening import apply, statistics

#: whitening matrices and operands of their tangents
Solution = tuple[Tensor, Tensor]
#: samples whose solutions are saved for backward. It takes 12 microseconds to repeat them, whatever
#: their number.
_MOST_SOLUTIONS = 8


def solution_for(x: Tensor, groups: int, num_iters: int) -> Solution | None:
    """Return uninitialized tensors for what Newton's iteration hands from forward to backward.

    They are 0.25 MB a sample. None where it is cheaper to repeat the iteration: for many samples.
    """
    if (
        x.numel() == 0
        or len(x) > _MOST_SOLUTIONS
        or not in_registers(groups, num_iters)
    ):
        return None
    whitening = torch.empty(
        (len(x), groups, groups), dtype=torch.float32, device=x.device
    )
    return whitening, operands(x, groups, num_iters)


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
    mean = torch.empty((len(x), groups), dtype=torch.float32, device=x.device)
    sigma = torch.empty((len(x), groups, groups), dtype=torch.float32, device=x.device)
    x = prepare(x)
    weight = _contiguous(weight)
    bias = _contiguous(bias)

    def steps() -> None:
        statistics(x, groups, eps, mean, sigma)
        whitening, kept = solution or (plans.empty(x, *sigma.shape), None)
        newton(sigma, num_iters, whitening, kept)
        apply(x, mean, sigma, whitening, weight, bias, relu, y)

    key = None
    if in_registers(groups, num_iters):
        layout = plans.layout_key(x, weight, bias)
        key = "forward", layout, y.stride(), groups, num_iters, eps, relu
    tensors = x, weight, bias, y, mean, sigma, *(solution or ())
    plans.run_planned(key, tensors, steps)
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
    groups = mean.shape[1]
    dx = torch.empty_like(x, memory_format=memory_format_of(x))
    dweight = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    dbias = torch.empty_like(dweight)
    x = prepare(x)
    dy = prepare(dy)
    weight = _contiguous(weight)
    if y is not None and y.stride() != dx.stride():
        y = torch.empty_like(dx).copy_(y)

    def steps() -> None:
        whitening, kept = solution or (plans.empty(x, *sigma.shape), None)
        products, grad, largest = grad_products(x, mean, dy, weight, y, dx)
        if solution is None and in_registers(groups, num_iters):
            kept = operands(x, groups, num_iters)
            newton(sigma, num_iters, whitening, kept)
        grad_sigma = matrix_gradients(
            products, whitening, dweight, dbias, sigma, grad, num_iters, kept
        )
        masked = dy if y is None else dx
        apply_backward(
            x, mean, sigma, masked, weight, whitening, grad_sigma, grad, largest, dx
        )

    key = None
    if in_registers(groups, num_iters):
        layout = plans.layout_key(x, dy, y, weight)
        key = "backward", layout, dx.stride(), groups, num_iters
    tensors = x, dy, y, weight, mean, sigma, dx, dweight, dbias, *(solution or ())
    plans.run_planned(key, tensors, steps)
    return dx, dweight, dbias


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
