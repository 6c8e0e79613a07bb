"""The number of constraints against the rank of their Jacobian, and the ranges against trying every number."""

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian

from gw_detectron.analysis.feasibility import batch_constraints, group_constraints, max_groups, min_columns


def independent_equations(*blocks: tuple[int, int]) -> int:
    """Rank of the equations "centered and white" for matrices of these sizes, at a random solution."""
    generator = torch.Generator().manual_seed(0)

    def equations(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.sum(1), (x @ x.T - x.shape[1] * torch.eye(len(x), dtype=x.dtype)).flatten()])

    rank = 0
    for rows, columns in blocks:
        x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        x = x - x.mean(1, keepdim=True)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        solution = columns**0.5 * u @ v
        assert equations(solution).abs().max() < 1e-10
        rank += np.linalg.matrix_rank(jacobian(equations, solution).flatten(1).numpy())
    return rank


def test_bn_and_bw():
    d, m = 5, 12
    assert batch_constraints(d, m).number == independent_equations(*[(1, m)] * d) == 2 * d
    assert batch_constraints(d, m, d).number == independent_equations((d, m)) == d * (d + 3) / 2
    assert batch_constraints(d, m, 2).number == independent_equations((2, m), (2, m), (1, m))
    assert batch_constraints(d, m, 99) == batch_constraints(d, m, d)


def test_gn_and_gw():
    d, m, g = 24, 2, 4
    assert group_constraints(d, m, g, whiten=False).number == independent_equations(*[(1, 6)] * g * m) == 2 * g * m
    found = group_constraints(d, m, g, whiten=True)
    assert found.number == independent_equations(*[(g, 6)] * m) == m * g * (g + 3) / 2
    assert (found.variables, found.rows, found.columns) == (d * m, g, 6)


def test_one_channel_or_group_is_standardized():
    assert batch_constraints(7, 9, 1) == batch_constraints(7, 9)
    assert group_constraints(8, 3, 1, whiten=True) == group_constraints(8, 3, 1, whiten=False)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 27, 64, 256, 1000])
def test_ranges_are_where_constraints_outnumber_variables(d):
    least = next(m for m in range(1, 9999) if batch_constraints(d, m, d).feasible)
    assert min_columns(d) == least == np.ceil((d + 3) / 2)
    assert next(m for m in range(1, 9999) if batch_constraints(d, m).feasible) == min_columns(1) == 2
    possible = [g for g in range(1, d + 1) if g * (g + 3) / 2 <= d]
    assert max_groups(d, whiten=True) == max(possible, default=0)
    assert max_groups(d, whiten=False) == max([g for g in range(1, d + 1) if 2 * g <= d], default=0)


def test_remark():
    assert group_constraints(256, 4, 8, whiten=True).remark == ""
    near = group_constraints(192, 4, 16, whiten=True)
    assert near.feasible and not near.stable
    assert "possible from 10 columns on and stable from 16 on" in near.remark
    assert near.remark.startswith("near-infeasible: whitening 16 rows over 12 columns")
    impossible = group_constraints(256, 1, 32, whiten=True)
    assert not impossible.feasible and impossible.ratio == 560 / 256
    assert "infeasible" in impossible.remark and "560 constraints on 256 numbers" in impossible.remark
    assert "standardizing over 2 columns" in batch_constraints(3, 2).remark


def test_invalid_arguments():
    with pytest.raises(ValueError, match=r"groups \(3\): does not divide 16"):
        group_constraints(16, 1, 3, whiten=True)
    with pytest.raises(ValueError, match=r"m \(0\): too small"):
        batch_constraints(4, 0)
