"""Identities between layers and solvers, as listed in gw_detectron/layers/__init__.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gw_detectron.layers import SOLVERS, BatchWhitening2d, Solver

from .cases import assert_close, bw, features, gw
from .oracle import newton_scalar


@pytest.mark.parametrize("corr", [False, True])
@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_single_channels_one_group_and_one_sample(solver, corr):
    """BN; layer norm over the sample and GN with one group; the same to both layers if every channel is a group."""
    x = features(4, 6, 5, 3)
    sample = features(1, 6, 9, 5)
    options = {"solver": solver, "corr": corr}
    # pivoted_cholesky replaces by eps instead of adding it
    eps = 0.0 if solver == "pivoted_cholesky" else 0.01
    # torch refuses 0
    batch_norm = F.batch_norm(x, None, None, training=True, eps=eps or 1e-30)

    assert_close(bw(x, 1, eps=eps, **options), batch_norm)

    y = gw(x, 1, eps=eps, **options)
    assert_close(y, F.layer_norm(x, x.shape[1:], eps=eps))
    assert_close(y, F.group_norm(x, 1, eps=eps))

    assert_close(gw(sample, 6, **options), bw(sample, 6, **options))


@pytest.mark.parametrize(
    ("width", "solver"), [(1, "newton"), (1, "zca"), (4, "standardize")]
)
def test_batch_whitening_with_a_running_covariance_is_bn_in_evaluation_too(
    width, solver
):
    whitening = BatchWhitening2d(
        6, width, solver, eps=0.01, momentum=0.3, running="covariance"
    ).double()
    norm = nn.BatchNorm2d(6, 0.01, 0.3).double()

    for seed in range(3):
        x = features(4, 6, 5, 3, seed=seed)
        assert_close(whitening(x), norm(x))

    assert_close(whitening.eval()(x), norm.eval()(x))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_standardizing_is_gn_over_the_sample_and_bn_over_the_batch(groups):
    x = features(4, 6, 5, 3)
    options = {"eps": 0.01, "solver": "standardize"}

    group_norm = F.group_norm(x, groups, eps=0.01)
    assert_close(gw(x, groups, **options), group_norm)

    batch_norm = F.batch_norm(x, None, None, training=True, eps=0.01)
    assert_close(bw(x, groups, **options), batch_norm)


@pytest.mark.parametrize(
    ("groups", "iters"), [(1, 0), (1, 5), (4, 3), (64, 5), (64, 9)]
)
def test_the_factor_of_newton_on_a_white_covariance(groups, iters):
    """psi(s^2 I) = f I / s with f = p_T(1/g) / sqrt(g), 1 for g = 1 and 0.766 for g = 64 after 5 steps."""
    identity = torch.eye(groups, dtype=torch.float64)
    factor = float(newton_scalar(1 / groups, iters)) / groups**0.5

    w = Solver("newton", iters, 0.0)(4.0 * identity)

    assert_close(w, factor * identity / 2, 1e-14)
    assert (factor == 1.0) == (groups == 1)
    if (groups, iters) == (64, 5):
        assert factor == pytest.approx(0.7658, abs=5e-5)
