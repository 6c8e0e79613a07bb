"""Group whitening by the fastest path that an input allows.

=============  ==========================================================================================
``triton``     Triton kernels: CUDA, float32 / float16 / bfloat16, up to 128 groups
``matmul``     batched matrix products in closed form: every device, and float64
``reference``  :func:`gw_detectron.ops.group_whitening.reference.group_whiten`, plain autograd: other solvers than ``newton``,
               ``torch.func``, forward-mode differentiation, and every export, which then runs where this package is
               not installed
=============  ==========================================================================================

The first two are one custom operator, ``torch.ops.gw_detectron.group_whiten``, with a formula for autograd, for fake
tensors (``torch.compile``) and for ``torch.utils.flop_counter``. Second derivatives are those of the reference.

The environment variable ``GW_DETECTRON_KERNELS=reference`` forces the reference, to compare with it; ``matmul`` forces
the matrix products where Triton would be taken. What ``torch.compile`` has compiled before keeps its path. A debug line
of the logger ``gw_detectron.layers`` names the path.
"""

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..solvers import DEFAULT_SOLVER, Solver
from . import (
    algorithm as closed_form,
)
from . import (
    matmul as matmul_kernels,
)
from . import (
    matmul_newton,
)
from . import (
    reference as functional,
)
from . import (
    triton as triton_kernels,
)

ENVIRONMENT_SWITCH = "GW_DETECTRON_KERNELS"
FORCEABLE = ("matmul", "reference")
_MODULES: dict[str, Any] = {"triton": triton_kernels, "matmul": matmul_kernels}
_FORWARD, _BACKWARD = "gw_detectron::group_whiten", "gw_detectron::group_whiten_backward"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_logger = logging.getLogger("gw_detectron.layers")


class _Chosen(threading.local):
    path = ""


_chosen = _Chosen()


@contextlib.contextmanager
def use_path(path: str) -> Iterator[None]:
    """Makes this thread take one path, as ``GW_DETECTRON_KERNELS`` does, which it overrules."""
    before, _chosen.path = _chosen.path, path
    try:
        yield
    finally:
        _chosen.path = before


def group_whiten(
    x: Tensor,
    num_groups: int = 64,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    solver: Solver = DEFAULT_SOLVER,
    relu: bool = False,
) -> Tensor:
    """:func:`gw_detectron.ops.group_whitening.reference.group_whiten`, to rounding, by the path that :func:`choose_path` names."""
    functional.check_tensors("group whitening", x, weight, bias)
    groups = functional.effective_groups(x.shape[1], num_groups)
    path = choose_path(x, groups, solver)
    if not torch.compiler.is_compiling() and _logger.isEnabledFor(logging.DEBUG):
        _log(path, x.device.type, x.dtype, x.shape[1], groups, str(solver))
    if path == "reference":
        return functional.group_whiten_reference(x, groups, weight, bias, solver=solver, relu=relu)
    return torch.ops.gw_detectron.group_whiten(x, weight, bias, groups, solver.num_iters, solver.eps, relu, path)[0]


def choose_path(x: Tensor, groups: int, solver: Solver = DEFAULT_SOLVER) -> str:
    """The path for an input of ``groups`` groups: ``"triton"``, ``"matmul"`` or ``"reference"``.

    Raises:
        ValueError: the environment variable ``GW_DETECTRON_KERNELS`` is neither ``reference`` nor ``matmul``.
    """
    forced = _chosen.path or os.environ.get(ENVIRONMENT_SWITCH, "")
    if forced and forced not in FORCEABLE:
        where, otherwise = ("use_path", "leave it out") if _chosen.path else (ENVIRONMENT_SWITCH, "unset the variable")
        raise ValueError(
            f"{where}={forced!r} is no path of group whitening that can be forced; allowed are {list(FORCEABLE)}, or "
            f"{otherwise}"
        )
    if forced == "reference" or solver.name != "newton" or solver.corr or _needs_plain_operations():
        return "reference"
    if forced == "matmul":
        return forced
    if triton_kernels.supported(x, groups):
        return "triton"
    return "matmul"


def _needs_plain_operations() -> bool:
    """Whether it is an export, ``torch.func`` or forward-mode differentiation, for which the operator has no rule."""
    # not is_exporting(), which up to torch 2.10 is true in torch.compile too
    if torch.jit.is_tracing() or torch.compiler._is_exporting_flag:  # type: ignore[attr-defined]
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@functools.cache
def _log(path: str, device: str, dtype: torch.dtype, channels: int, groups: int, solver: str) -> None:
    _logger.debug(
        "group whitening of %d channels in %d groups (%s, %s, %s) takes the %s path",
        *(channels, groups, dtype, device, solver, path),
    )


def _operator(name: str) -> Callable[[_Function], _Function]:
    """Registers a function as a custom operator, without the checks by which ``custom_op`` slows every call down."""

    def register(function: _Function) -> _Function:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "default", function)
        return function

    return register


@_operator(_FORWARD)
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    num_iters: int,
    eps: float,
    relu: bool,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with functional.autocast_off(x.device.type):
        y, mean, sigma = closed_form.forward(_MODULES[path], x, weight, bias, groups, num_iters, eps, relu)
    return y.contiguous(memory_format=functional.memory_format_of(x)), mean, sigma


@torch.library.register_fake(_FORWARD)
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = functional.compute_dtype(x)
    y = torch.empty_like(x, memory_format=functional.memory_format_of(x))
    return y, x.new_empty((x.shape[0], groups), dtype=dtype), x.new_empty((x.shape[0], groups, groups), dtype=dtype)


@_operator(_BACKWARD)
def _backward(
    dy: Tensor,
    y: Tensor | None,
    x: Tensor,
    mean: Tensor,
    sigma: Tensor,
    weight: Tensor | None,
    num_iters: int,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with functional.autocast_off(x.device.type):
        dx, dweight, dbias = closed_form.backward(_MODULES[path], dy, y, x, mean, sigma, weight, num_iters)
    return dx.contiguous(memory_format=functional.memory_format_of(x)), dweight, dbias


@torch.library.register_fake(_BACKWARD)
def _(dy: Tensor, y: Tensor | None, x: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=functional.memory_format_of(x))
    return dx, mean.new_empty(x.shape[1]), mean.new_empty(x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, ctx.groups, ctx.num_iters, ctx.eps, relu, ctx.path = inputs
    y, mean, sigma = output
    ctx.mark_non_differentiable(mean, sigma)
    ctx.set_materialize_grads(False)  # zeros for mean and sigma, as large as the matrices of all samples
    ctx.save_for_backward(x, mean, sigma, weight, y if relu else None)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:  # a gradient of zero
        return (None,) * 8
    x, mean, sigma, weight, y = ctx.saved_tensors
    needed = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():  # create_graph: the gradient is to be differentiated again
        bias = None  # of any value: no derivative depends on it
        if ctx.bias_dtype is not None:
            bias = torch.zeros(x.shape[1], dtype=ctx.bias_dtype, device=x.device, requires_grad=True)
        # aliases, at which autograd stops: x may have been computed from weight, in a layer that is used twice, or
        # weight from x
        x, weight = x.view_as(x), None if weight is None else weight.view_as(weight)
        inputs = [tensor for tensor, wanted in zip((x, weight, bias), needed, strict=True) if wanted]
        through = dy if y is None else torch.ops.aten.threshold_backward(dy, y.detach(), 0)
        with functional.autocast_off(x.device.type):
            before_relu = functional.group_whiten_reference(
                x, ctx.groups, weight, bias, solver=Solver(num_iters=ctx.num_iters, eps=ctx.eps)
            )
            found = iter(torch.autograd.grad(before_relu, inputs, through, create_graph=True))
        gradients = tuple(next(found) if wanted else None for wanted in needed)
    else:
        results = torch.ops.gw_detectron.group_whiten_backward(dy, y, x, mean, sigma, weight, ctx.num_iters, ctx.path)
        dtypes = (x.dtype, None if weight is None else weight.dtype, ctx.bias_dtype)
        gradients = tuple(
            result.to(dtype) if wanted else None for result, dtype, wanted in zip(results, dtypes, needed, strict=True)
        )
    return *gradients, None, None, None, None, None


torch.library.register_autograd(_FORWARD, _gradients, setup_context=_setup_context)


def _product_flops(n: int, groups: int, columns: int, products: int) -> int:
    return 2 * n * groups * groups * columns * products


@register_flop_formula(torch.ops.gw_detectron.group_whiten)
def _forward_flops(x: Any, weight: Any, bias: Any, groups: int, num_iters: int, *_: Any, **__: Any) -> int:
    """Covariance, whitened output and iteration; the arguments are shapes."""
    n, columns = x[0], math.prod(x[1:]) // groups
    forward, _tangent = matmul_newton.products(num_iters)
    return _product_flops(n, groups, columns, 2) + _product_flops(n, groups, groups, forward)


@register_flop_formula(torch.ops.gw_detectron.group_whiten_backward)
def _backward_flops(
    dy: Any, y: Any, x: Any, mean: Any, sigma: Any, weight: Any, num_iters: int, *_: Any, **__: Any
) -> int:
    """Gradients of whitening matrices and input (3 products), and the iteration with its tangents."""
    n, groups = mean
    columns = math.prod(x[1:]) // groups
    forward, tangent = matmul_newton.products(num_iters)
    return _product_flops(n, groups, columns, 3) + _product_flops(n, groups, groups, forward + tangent)
