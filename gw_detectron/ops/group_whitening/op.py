"""The custom operator ``torch.ops.gw_detectron.group_whiten``, and the choice of its backend.

=============  ============================================================================================
backend        used for
=============  ============================================================================================
``triton``     CUDA, float32 / float16 / bfloat16, up to 128 groups: Triton kernels
``matmul``     every device, and float64: batched matrix products
``reference``  other solvers than ``newton``, more than 8 iterations without Triton, ``torch.func``, forward-mode
               AD, and every export, which then runs where this package is not installed: plain operations, no
               custom operator
=============  ============================================================================================

The operator has formulas for autograd and fake tensors (``torch.compile``). Its second derivatives are the reference's.

The environment variable ``GW_DETECTRON_KERNELS`` forces a backend: ``reference``, to compare with it, or ``matmul``
in place of ``triton``. Code that ``torch.compile`` has compiled keeps its backend. The logger ``gw_detectron.layers``
reports the backend at level DEBUG.
"""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..checks import autocast_off, check_tensors, compute_dtype, memory_format_of
from ..solvers import DEFAULT_SOLVER, Solver, check_solver
from ..torch_private import is_batched, is_dispatched, needs_plain_operations
from . import matmul, triton
from .reference import effective_groups, group_whiten_reference

ENVIRONMENT_SWITCH = "GW_DETECTRON_KERNELS"
#: values of the environment variable
FORCEABLE = ("matmul", "reference")
#: backend -> module of its ``forward`` and ``backward``
_BACKENDS = {"matmul": matmul, "triton": triton}
_FORWARD, _BACKWARD = "gw_detectron::group_whiten", "gw_detectron::group_whiten_backward"
_logger = logging.getLogger("gw_detectron.layers")


class _Forced(threading.local):
    backend = ""


_forced = _Forced()


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Force ``"matmul"`` or ``"reference"`` in this thread, whatever ``GW_DETECTRON_KERNELS`` is."""
    before, _forced.backend = _forced.backend, backend
    try:
        yield
    finally:
        _forced.backend = before


def group_whiten(
    x: Tensor,
    num_groups: int = 64,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    solver: Solver = DEFAULT_SOLVER,
    relu: bool = False,
) -> Tensor:
    r"""Whiten the channel groups of each sample by its own covariance.

    .. math:: y = \gamma \, \Pi^{-1}(\psi(\Sigma) X_C) + \beta, \quad \Sigma = \tfrac{1}{M} X_C X_C^T + \epsilon I

    See :func:`~gw_detectron.ops.group_whitening.reference.group_whiten_reference` for the symbols. The result equals
    the reference up to rounding, on the backend of :func:`choose_backend`. Statistics and solver run in float32
    (float64 for float64 input), also under autocast. In float32 values from about 1e19 on overflow the covariance. A
    sample without variance (constant, or a single column) gives ``bias``, unless eps is smaller than the squared
    rounding error of its mean; then the rounding error is whitened.

    Args:
        x: floating point, (N, C, *spatial) with any number of spatial dimensions, in any memory format.
        num_groups: g, capped at C; contiguous channels form a group.
        weight: per-channel scale :math:`\gamma`, (C,).
        bias: per-channel shift :math:`\beta`, (C,).
        solver: covariance -> whitening matrix, :math:`\psi`.
        relu: return :math:`\max(y, 0)`, fused into the same passes over memory.

    Returns:
        y in the shape, dtype and memory format of ``x``. For an empty ``x`` y is empty and still depends on ``weight``
        and ``bias``, so that a process without samples can take part in distributed training.

    Raises:
        ValueError: wrong rank or dtype of ``x``, groups that do not divide the channels, or affine parameters of
            another shape than (C,).
        TypeError: ``solver`` is not a Solver.
        NonFiniteError: NaN or infinity in the input of a solver that uses eigendecomposition.

    Source: Group Whitening, Eqs. 8-10, and its supplement, Algorithms 1-2.
    """
    check_solver(solver)
    check_tensors(x, weight, bias)
    return whiten(x, weight, bias, effective_groups(x.shape[1], num_groups), solver, relu)


def whiten(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    solver: Solver,
    relu: bool = False,
) -> Tensor:
    """Compute :func:`group_whiten` of checked arguments."""
    backend = choose_backend(x, groups, solver)
    compiling = torch.compiler.is_compiling()
    if not compiling and _logger.isEnabledFor(logging.DEBUG):
        _log(backend, x.device.type, x.dtype, x.shape[1], groups, str(solver))
    if backend == "reference":
        return group_whiten_reference(x, weight, bias, groups, solver, relu)
    arguments = x, weight, bias, groups, solver.num_iters, solver.eps, relu, backend
    if compiling or is_dispatched(x, weight, bias):
        return torch.ops.gw_detectron.group_whiten(*arguments)[0]
    if not torch.is_grad_enabled():
        return _forward(*arguments)[0]
    return GroupWhiten.apply(*arguments)[0]


def choose_backend(x: Tensor, groups: int, solver: Solver = DEFAULT_SOLVER) -> str:
    """Return the backend for an input: ``"triton"``, ``"matmul"`` or ``"reference"``."""
    forced = _forced.backend or os.environ.get(ENVIRONMENT_SWITCH, "")
    if forced and forced not in FORCEABLE:
        where, otherwise = (
            ("use_backend", "leave it out")
            if _forced.backend
            else (ENVIRONMENT_SWITCH, "unset it")
        )
        raise ConfigError(
            f"{where} ({forced!r}): cannot be forced. Fix: {otherwise}, or use {list(FORCEABLE)}."
        )
    if (
        forced == "reference"
        or solver.name != "newton"
        or solver.corr
        or needs_plain_operations()
    ):
        return "reference"
    if forced != "matmul" and (x.is_cuda or triton.INTERPRETED) and triton.supported(x, groups):
        return "triton"
    return "matmul" if solver.num_iters <= matmul.MOST_ITERS else "reference"


@functools.cache
def _log(
    backend: str, device: str, dtype: torch.dtype, channels: int, groups: int, solver: str
) -> None:
    _logger.debug(
        "group whitening of %d channels in %d groups (%s, %s, %s): backend %s",
        *(channels, groups, dtype, device, solver, backend),
    )


def _define(name: str, function: Callable[..., Any], arguments: str) -> None:
    """Define a custom operator without the slow per-call checks of ``custom_op``.

    It takes any strides: else torch.compile, which makes convolutions channels_last, would copy its inputs back.
    """
    schema = f"({arguments}, str backend) -> (Tensor, Tensor, Tensor)"
    torch.library.define(
        name, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    )
    torch.library.impl(name, "default", function)


# the last argument is the name of the backend, which takes the others
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _BACKENDS[arguments[-1]].forward(*arguments[:-1])


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _BACKENDS[arguments[-1]].backward(*arguments[:-1])


_define(
    _FORWARD,
    _forward,
    "Tensor x, Tensor? weight, Tensor? bias, SymInt groups, SymInt iters, float eps, bool relu",
)
_define(
    _BACKWARD,
    _backward,
    "Tensor dy, Tensor? y, Tensor x, Tensor mean, Tensor sigma, Tensor? weight, SymInt iters",
)


@torch.library.register_fake(_FORWARD)
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(x)
    y = torch.empty_like(x, memory_format=memory_format_of(x))
    return (
        y,
        x.new_empty((x.shape[0], groups), dtype=dtype),
        x.new_empty((x.shape[0], groups, groups), dtype=dtype),
    )


@torch.library.register_fake(_BACKWARD)
def _(
    dy: Tensor, y: Tensor | None, x: Tensor, mean: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=memory_format_of(x))
    return dx, mean.new_empty(x.shape[1]), mean.new_empty(x.shape[1])


class GroupWhiten(torch.autograd.Function):
    """The operator without the dispatcher, which takes as much host time as all launches: for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, _, _, groups, iters, *_, backend = inputs
        solution = triton.solution_for(x, groups, iters) if backend == "triton" else None
        output = (
            _forward(*inputs)
            if solution is None
            else _BACKENDS[backend].forward(*inputs[:-1], solution)
        )
        _setup_context(ctx, inputs, output, solution)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dy is None:  # the output is not used
            return (None,) * 8
        x, mean, sigma, weight, y, *solution = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or is_batched(dy):  # create_graph=True, or vmap over dy
            found = iter(_differentiable_gradients(ctx, dy, x, weight, y, needed))
            gradients = tuple(next(found) if wanted else None for wanted in needed)
        else:
            arguments = dy, y, x, mean, sigma, weight, ctx.num_iters
            if torch.compiler.is_compiling() or is_dispatched(dy, x, weight):
                results = torch.ops.gw_detectron.group_whiten_backward(*arguments, ctx.backend)
            elif solution:
                results = triton.backward(*arguments, tuple(solution))
            else:
                results = _backward(*arguments, ctx.backend)
            dtypes = (x.dtype, None if weight is None else weight.dtype, ctx.bias_dtype)
            gradients = tuple(
                result.to(dtype) if wanted else None
                for result, dtype, wanted in zip(results, dtypes, needed, strict=True)
            )
        return *gradients, None, None, None, None, None


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor, Tensor],
    solution: triton.Solution | None = None,
) -> None:
    x, weight, bias, ctx.groups, ctx.num_iters, ctx.eps, relu, ctx.backend = inputs
    y, mean, sigma = output
    ctx.mark_non_differentiable(mean, sigma)
    ctx.set_materialize_grads(
        False
    )  # else zeros for mean and sigma, as large as the matrices of all samples
    ctx.save_for_backward(x, mean, sigma, weight, y if relu else None, *(solution or ()))
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiable_gradients(
    ctx: Any,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    y: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Return the needed gradients by autograd through the reference."""
    bias = None  # any value: derivatives do not depend on the bias
    if ctx.bias_dtype is not None:
        bias = torch.zeros(
            x.shape[1], dtype=ctx.bias_dtype, device=x.device, requires_grad=True
        )
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # autograd stops at these aliases: x may be a function of weight (in a layer used twice), or weight of x
        x, weight = x.view_as(x), None if weight is None else weight.view_as(weight)
    tensors = zip((x, weight, bias), needed, strict=True)
    inputs = [tensor for tensor, wanted in tensors if wanted and tensor is not None]
    masked = dy if y is None else torch.ops.aten.threshold_backward(dy, y.detach(), 0)
    with torch.enable_grad(), autocast_off(x.device.type):
        solver = Solver(num_iters=ctx.num_iters, eps=ctx.eps)
        before_relu = group_whiten_reference(x, weight, bias, ctx.groups, solver)
        return torch.autograd.grad(before_relu, inputs, masked, create_graph=create_graph)


torch.library.register_autograd(_FORWARD, GroupWhiten.backward, setup_context=_setup_context)
