"""The iteration in fewer products: its rounding, and how many there are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gw_detectron.layers import newton_inverse_sqrt
from gw_detectron.ops.solvers.newton import count_products, newton_backward


def covariances(n: int, g: int, columns: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(n, g, columns, generator=torch.Generator().manual_seed(g), dtype=dtype)
    return x @ x.mT / columns


def published_steps(sigma: torch.Tensor, num_iters: int) -> torch.Tensor:
    """P_k = (3 P_{k-1} - P_{k-1}^3 Sigma_N) / 2, with Q_k = P_k^2 Sigma_N updated as Q_{k-1} R_k^2."""
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    p, q = torch.eye(sigma.shape[-1], dtype=sigma.dtype).expand_as(sigma), sigma / trace
    for _ in range(num_iters):
        r = 1.5 * torch.eye(sigma.shape[-1], dtype=sigma.dtype) - 0.5 * q
        p, q = p @ r, q @ r @ r
    return p / trace.sqrt()


@pytest.mark.parametrize("num_iters", [1, 5, 12])
def test_rounding_is_that_of_the_published_steps(num_iters):
    """In float32 the error is at most twice that of the textbook form."""
    sigma = covariances(8, 64, 2000)
    exact = published_steps(sigma, num_iters)
    textbook = (published_steps(sigma.float(), num_iters) - exact).norm()
    assert (newton_inverse_sqrt(sigma.float(), num_iters) - exact).norm() <= 2 * textbook + 1e-7 * exact.norm()


class Products(TorchDispatchMode):
    """Count batched products of (g, g) matrices; torch's own counter misses in-place ones."""

    def __init__(self, g: int) -> None:
        super().__init__()
        self.shape, self.count = (g, g), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "bmm" in func.__name__ and result.shape[1:] == self.shape:
            self.count += 1
        return result


@pytest.mark.parametrize("num_iters", range(9))
def test_products_are_counted_as_they_are_run(num_iters):
    sigma = covariances(2, 8, 30)
    values, tangents = count_products(num_iters)
    with Products(8) as counted:
        newton_inverse_sqrt(sigma, num_iters)
    assert counted.count == values
    with Products(8) as counted:
        newton_backward(sigma, torch.randn_like(sigma), num_iters)
    assert counted.count == values + tangents
    assert num_iters != 5 or (values, tangents) == (10, 14)
