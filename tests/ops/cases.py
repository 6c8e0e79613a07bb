"""Inputs and settings shared by the tests of operations and layers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from gw_detectron.layers import GroupWhitening2d, Solver, batch_whiten, group_whiten
from gw_detectron.ops.group_whitening.reference import group_whiten_reference

from .oracle import Setting

GROUPS = (1, 8, 16, 32, 64)
#: every solver, Newton with every number of steps
SOLVER_ARGS = [{"solver": "newton", "iters": t} for t in (1, 3, 5, 7)] + [
    {"solver": "zca"}
]


def grid() -> list[tuple[int, tuple[int, ...], Setting]]:
    """Return (C, spatial size, setting): every g and solver, C from 8 to 2048, odd sizes, M > g."""
    rows = []
    for g in GROUPS:
        sizes = [
            (max(g, 8), (13, 7)),
            (3 * g if g > 1 else 13, (7, 5)),
            (256, (5, 7)),
            (2048, (3, 3)),
        ]
        for channels, size in sizes:
            rows += [(channels, size, Setting(g, **args)) for args in SOLVER_ARGS]
    return rows


def correlated(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return float64 features: correlated channels of unequal scale, with a mean."""
    samples, channels, *spatial = shape
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=shape) + 0.5 * rng.normal(size=(samples, 1, *spatial))
    per_channel = (1, channels, *[1] * len(spatial))
    return mixed * rng.uniform(0.5, 2.0, per_channel) + rng.normal(size=per_channel)


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return :func:`correlated` as a tensor."""
    return torch.from_numpy(correlated(shape, seed))


def randn(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return independent normal values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def gw(
    x, groups, weight=None, bias=None, *, solver="newton", relu=False, **options
) -> torch.Tensor:
    """Group whitening by a solver that is given by its name and options."""
    return group_whiten(
        x, groups, weight, bias, solver=Solver(solver, **options), relu=relu
    )


def bw(x, width, weight=None, bias=None, *, solver="newton", **options) -> torch.Tensor:
    """Batch whitening by a solver that is given by its name and options."""
    return batch_whiten(x, width, weight, bias, solver=Solver(solver, **options))


def layer(channels: int, groups: int = 64, **options) -> GroupWhitening2d:
    """Build a layer with random affine parameters, so that a lost one shows."""
    made = GroupWhitening2d(channels, groups, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        made.weight.uniform_(0.5, 1.5, generator=generator)
        made.bias.normal_(generator=generator)
    return made


def build(
    channels: int, setting: Setting, dtype: torch.dtype = torch.float64
) -> GroupWhitening2d:
    """Build the layer of a setting."""
    options = {"num_iters": setting.iters, "eps": setting.eps, "solver": setting.solver}
    return layer(channels, setting.groups, **options).to(dtype)


def affine_of(layer: GroupWhitening2d) -> tuple[np.ndarray, np.ndarray]:
    """Return (weight, bias) as float64 arrays for the oracle."""
    return layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()


def gradients(
    module: nn.Module, x: torch.Tensor, dy: torch.Tensor, **options
) -> list[torch.Tensor]:
    """Return y and the gradients of x, weight and bias."""
    x = x.clone().requires_grad_()
    y = module(x, **options)
    inputs = x, module.weight, module.bias
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def reference(
    module: GroupWhitening2d, x: torch.Tensor, dy: torch.Tensor, *, relu: bool = False
) -> list[torch.Tensor]:
    """Compute the same in float64 by the reference."""
    x, weight, bias = (
        tensor.detach().double().requires_grad_()
        for tensor in (x, module.weight, module.bias)
    )
    y = group_whiten_reference(x, weight, bias, module.num_groups, module.solver, relu)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy.double())]


def assert_like_reference(
    made: GroupWhitening2d, x: torch.Tensor, dy: torch.Tensor, limit: float, **options
) -> None:
    """Compare y and all gradients with float64."""
    values = gradients(made, x, dy, **options)
    assert_errors_below(limit, values, reference(made, x, dy, **options))


def assert_errors_below(
    limit: float, values: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]
) -> None:
    """Compare tensors in the Frobenius norm."""
    for value, wanted in zip(values, expected, strict=True):
        assert error(value, wanted) < limit


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    expected = expected.double()
    difference = value.double() - expected
    return (difference.norm() / expected.norm()).item()


def assert_close(value, expected, tolerance: float = 1e-10) -> None:
    """Compare a tensor with a tensor or array, by the absolute error."""
    expected = torch.as_tensor(expected)
    torch.testing.assert_close(value.detach(), expected, rtol=0, atol=tolerance)
