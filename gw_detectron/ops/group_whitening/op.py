"""The custom operator ``torch.ops.gw_detectron.group_whiten``, and the choice of its backend.

=============  =================================================================================
backend        used for
=============  =================================================================================
``triton``     CUDA, float32 / float16 / bfloat16, up to 128 groups: Triton kernels
``matmul``     every device, and float64: batched matrix products
``reference``  other solvers than ``newton``, more than 8 iterations without Triton,
               ``torch.func``, forward-mode AD, and every export, which then runs where this
               package is not installed: plain operations, no custom operator
=============  =================================================================================

The operator has formulas for autograd and fake tensors (``torch.compile``). Its second derivatives
are the reference's.

The environment variable ``GW_DETECTRON_KERNELS`` forces a backend: ``reference``, to compare with
it, or ``matmul`` in place of ``triton``. Code that ``torch.compile`` has compiled keeps its backend.
The logger ``gw_detectron.layers`` reports the backend at level DEBUG.
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
from ..arguments import check_tensors
from ..numerics import compute_dtype, memory_format_of
from ..reference_gradients import needed_gradients, reference_gradients
from ..solvers import DEFAULT_SOLVER, Solver, check_solver
from ..torch_private import is_batched, is_dispatched, needs_plain_operations
from . import matmul, triton
from .reference import effective_groups, group_whiten_reference

ENVIRONMENT_SWITCH = "GW_DETECTRON_KERNELS"
#: values of the environment variable
FORCEABLE = ("matmul", "reference")
#: backend -> module of its ``forward`` and ``backward``
_BACKENDS = {"matmul": matmul, "triton": triton}
_FORWARD, _BACKWARD = (
    "gw_detectron::group_whiten",
    "gw_detectron::group_whiten_backward",
)
_logger = logging.getLogger("gw_detectron.layers")


class _Forced(threading.local):
    backend = ""


_forced = _Forced()


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Force ``"matmul"`` or ``"reference"`` in this thread, whatever ``GW_DETECTRON_KERNELS`` is."""
    before = _forced.backend
    _forced.backend = backend
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

    See :func:`~gw_detectron.ops.group_whitening.reference.group_whiten_reference` for the symbols.
    The result equals the reference up to rounding, on the backend of :func:`choose_backend`.
    Statistics and solver run in float32 (float64 for float64 input), also under autocast. In float32
    values from about 1e19 on overflow the covariance. A sample without variance (constant, or a
    single column) gives ``bias``, unless eps is smaller than the squared rounding error of its mean;
    then the rounding error is whitened.

    Args:
        x: floating point, (N, C, *spatial) with any number of spatial dimensions, in any memory format.
        num_groups: g, capped at C; contiguous channels form a group.
        weight: per-channel scale :math:`\gamma`, (C,).
        bias: per-channel shift :math:`\beta`, (C,).
        solver: covariance -> whitening matrix, :math:`\psi`.
        relu: return :math:`\max(y, 0)`, fused into the same passes over memory.

    Returns:
        y in the shape, dtype and memory format of ``x``. For an empty ``x`` y is empty and still
        depends on ``weight`` and ``bias``, so that a process without samples can take part in
        distributed training.

    Raises:
        ValueError: wrong rank or dtype of ``x``, groups that do not divide the channels, or affine
            parameters of another shape than (C,).
        TypeError: ``solver`` is not a Solver.
        NonFiniteError: NaN or infinity in the input of a solver that uses eigendecomposition.

    Source: Group Whitening, Eqs. 8-10, and its supplement, Algorithms 1-2.
    """
    check_solver(solver)
    check_tensors(x, weight, bias)
    groups = effective_groups(x.shape[1], num_groups)
    return whiten(x, weight, bias, groups, solver, relu)


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


def forced_backend() -> str:
    """Return the backend that :func:`use_backend` or the environment forces, or ""."""
    forced = _forced.backend or os.environ.get(ENVIRONMENT_SWITCH, "")
    if forced and forced not in FORCEABLE:
        source = "use_backend" if _forced.backend else ENVIRONMENT_SWITCH
        raise ConfigError(
            f"{source} ({forced!r}): cannot be forced. "
            f"Fix: leave it out, or use {list(FORCEABLE)}."
        )
    return forced


def choose_backend(x: Tensor, groups: int, solver: Solver = DEFAULT_SOLVER) -> str:
    """Return the backend for an input: ``"triton"``, ``"matmul"`` or ``"reference"``."""
    forced = forced_backend()
    if forced == "reference" or needs_plain_operations():
        return "reference"
    if solver.name != "newton" or solver.corr:
        return "reference"

    has_kernels = x.is_cuda or triton.INTERPRETED
    if has_kernels and forced != "matmul" and triton.supported(x, groups):
        return "triton"
    if solver.num_iters <= matmul.MOST_ITERS:
        return "matmul"
    return "reference"


@functools.cache
def _log(
    backend: str,
    device: str,
    dtype: torch.dtype,
    channels: int,
    groups: int,
    solver: str,
) -> None:
    _logger.debug(
        f"group whitening of {channels} channels in {groups} groups "
        f"({dtype}, {device}, {solver}): backend {backend}"
    )


# the last argument of the operators is the name of the backend, which takes the others
def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, backend = arguments
    if x.numel() == 0:  # there is no column to average
        return _blank_outputs(x, *inputs)
    return _BACKENDS[backend].forward(x, *inputs)


def _backward(
    dy: Tensor, y: Tensor | None, x: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *inputs, backend = arguments
    if x.numel() == 0:
        return _blank_gradients(dy, y, x, *inputs)
    return _BACKENDS[backend].backward(dy, y, x, *inputs)


def _blank_outputs(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return zeros for y, mean and sigma."""
    n = x.shape[0]
    dtype = compute_dtype(x)
    y = torch.zeros_like(x, memory_format=memory_format_of(x))
    mean = x.new_zeros((n, groups), dtype=dtype)
    sigma = x.new_zeros((n, groups, groups), dtype=dtype)
    return y, mean, sigma


def _blank_gradients(
    dy: Tensor, y: Tensor | None, x: Tensor, mean: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return zeros for the gradients of x, weight and bias."""
    channels = x.shape[1]
    dx = torch.zeros_like(x, memory_format=memory_format_of(x))
    return dx, mean.new_zeros(channels), mean.new_zeros(channels)


def _define(
    name: str, function: Callable[..., Any], fake: Callable[..., Any], arguments: str
) -> None:
    """Define a custom operator without the slow per-call checks of ``custom_op``.

    It takes any strides: else torch.compile, which makes convolutions channels_last, would copy its
    inputs back.
    """
    schema = f"({arguments}, str backend) -> (Tensor, Tensor, Tensor)"
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout
    torch.library.define(name, schema, tags=tags)
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)


_define(
    _FORWARD,
    _forward,
    _blank_outputs,
    "Tensor x, Tensor? weight, Tensor? bias, SymInt groups, SymInt iters, float eps, bool relu",
)
_define(
    _BACKWARD,
    _backward,
    _blank_gradients,
    "Tensor dy, Tensor? y, Tensor x, Tensor mean, Tensor sigma, Tensor? weight, SymInt iters",
)


class GroupWhiten(torch.autograd.Function):
    """The operator without the dispatcher, which takes as much host time as all launches: for eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, _, _, groups, iters, *_, backend = inputs
        solution = (
            triton.solution_for(x, groups, iters) if backend == "triton" else None
        )
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

        # create_graph=True, or vmap over dy
        if torch.is_grad_enabled() or is_batched(dy):
            gradients = _differentiable_gradients(ctx, dy)
        else:
            gradients = _closed_gradients(ctx, dy)
        return *gradients, None, None, None, None, None


def _setup_context(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor, Tensor],
    solution: triton.Solution | None = None,
) -> None:
    x, weight, bias, ctx.groups, ctx.num_iters, ctx.eps, relu, ctx.backend = inputs
    y, mean, sigma = output
    kept = y if relu else None
    ctx.mark_non_differentiable(mean, sigma)
    # else zeros for mean and sigma, as large as the matrices of all samples
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, mean, sigma, kept, *(solution or ()))


def _closed_gradients(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Return the gradients of x, weight and bias by the backend's formulas; None where not needed."""
    x, weight, bias, mean, sigma, y, *solution = ctx.saved_tensors
    arguments = dy, y, x, mean, sigma, weight, ctx.num_iters
    if torch.compiler.is_compiling() or is_dispatched(dy, x, weight):
        results = torch.ops.gw_detectron.group_whiten_backward(*arguments, ctx.backend)
    elif solution:
        results = triton.backward(*arguments, tuple(solution))
    else:
        results = _backward(*arguments, ctx.backend)
    return needed_gradients(results, (x, weight, bias), ctx.needs_input_grad[:3])


def _differentiable_gradients(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Return the gradients by autograd through the reference; None where not needed."""
    x, weight, bias, _, _, y, *_ = ctx.saved_tensors
    if y is not None:  # through the ReLU
        dy = torch.ops.aten.threshold_backward(dy, y.detach(), 0)

    before_relu = functools.partial(
        group_whiten_reference,
        groups=ctx.groups,
        solver=Solver(num_iters=ctx.num_iters, eps=ctx.eps),
    )
    return reference_gradients(
        before_relu, (x, weight, bias), ctx.needs_input_grad[:3], dy
    )


torch.library.register_autograd(
    _FORWARD, GroupWhiten.backward, setup_context=_setup_context
)
