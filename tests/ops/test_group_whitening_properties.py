"""Properties of group whitening for all inputs (float64, examples by hypothesis)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import oracle
from .cases import correlated, few, gw

solvers = st.sampled_from(["newton", "zca"])
seeds = st.integers(0, 2**32 - 1)
sizes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def inputs(draw, more_columns_than_groups=False):
    """(g, x): x (N, C, *spatial) float64 with C a multiple of g."""
    groups = draw(st.integers(1, 12))
    per_group, size = draw(st.integers(1, 4)), draw(sizes)
    if more_columns_than_groups:
        per_group += 2 * groups
    x = correlated((draw(st.integers(1, 3)), groups * per_group, *size), draw(seeds))
    return groups, torch.from_numpy(x)


def rows(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(N, C, *spatial) -> (N, g, M)."""
    return x.reshape(x.shape[0], groups, -1)


def assert_same(a: torch.Tensor, b: torch.Tensor, tol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@few
@given(inputs(), solvers, seeds)
def test_rotated_groups_give_rotated_output(case, solver, seed):
    """W(Q Sigma Q^T) = Q W(Sigma) Q^T for orthogonal Q, unlike PCA or Cholesky whitening."""
    groups, x = case
    q = torch.from_numpy(np.linalg.qr(np.random.default_rng(seed).normal(size=(groups, groups)))[0])
    y = rows(gw(x, groups, eps=1e-3, solver=solver), groups)
    rotated = gw((q @ rows(x, groups)).reshape(x.shape), groups, eps=1e-3, solver=solver)
    assert_same(rows(rotated, groups), q @ y)


@few
@given(inputs(), solvers, st.floats(1e-3, 1e3), st.sampled_from([-1, 1]))
def test_a_factor_changes_at_most_the_sign_if_eps_is_scaled_too(case, solver, factor, sign):
    """Sigma(a x, a^2 eps) = a^2 Sigma(x, eps), so W shrinks by |a|."""
    groups, x = case
    y = gw(x, groups, eps=1e-3, solver=solver)
    assert_same(gw(sign * factor * x, groups, eps=1e-3 * factor**2, solver=solver), sign * y)


@few
@given(inputs(), st.floats(1e-4, 1.0))
def test_zca_output_covariance(case, eps):
    """W (Sigma - eps I) W = I - eps Sigma^(-1): an eigenvalue l of x's covariance becomes l / (l + eps)."""
    groups, x = case
    x_c = rows(x, groups) - rows(x, groups).mean(-1, keepdim=True)
    y = rows(gw(x, groups, eps=eps, solver="zca"), groups)
    identity = torch.eye(groups, dtype=x.dtype)
    sigma = x_c @ x_c.mT / x_c.shape[-1] + eps * identity
    assert_same(y @ y.mT / y.shape[-1], identity - eps * torch.linalg.inv(sigma), 1e-7)


@few
@given(inputs(), st.integers(0, 7), st.floats(1e-6, 1.0))
def test_newton_output_covariance(case, iters, eps):
    """An eigenvalue l becomes p_T(s)^2 l / tr(Sigma) <= 1, where s = (l + eps) / tr(Sigma)."""
    groups, x = case
    x_c = rows(x, groups) - rows(x, groups).mean(-1, keepdim=True)
    y = rows(gw(x, groups, num_iters=iters, eps=eps), groups)
    before, vectors = torch.linalg.eigh(x_c @ x_c.mT / x_c.shape[-1])
    before = before.clamp_min(0)
    trace = (before + eps).sum(-1, keepdim=True)
    p = torch.from_numpy(oracle.newton_scalar(((before + eps) / trace).numpy(), iters))
    after = p**2 * before / trace
    assert (after <= 1 + 1e-9).all()
    assert_same(y @ y.mT / y.shape[-1], (vectors * after[:, None, :]) @ vectors.mT)


@pytest.mark.parametrize("groups", [2, 8])
def test_newton_goes_to_zca(groups):
    x = torch.from_numpy(correlated((2, 32, 9, 7)))
    exact = gw(x, groups, solver="zca")
    errors = [(gw(x, groups, num_iters=iters) - exact).abs().max().item() for iters in (0, 2, 4, 12)]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-9
