"""GW conditions better than GN, at the paper's own size: one random network is cheap."""

import numpy as np
import pytest
import torch

from experiments.conditioning import analyze_conditioning, condition_numbers


@pytest.fixture(scope="module")
def result():
    return analyze_conditioning(layers=(1, 2), repeats=1, seed=0)


def test_the_findings_and_the_table_say_the_same(result):
    assert len(result.findings) == 3 and all(result.findings.values())
    assert {(row["features"], row["moment"]) for row in result.rows} == {
        (features, moment) for features in ("before ReLU", "after ReLU") for moment in ("about the mean", "about zero")
    }


def test_condition_numbers_by_definition():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 20))
    moment = x.T @ x
    values = np.sort(np.linalg.eigvalsh(moment))[::-1]
    found = condition_numbers(torch.from_numpy(moment), (90, 80, 100))
    np.testing.assert_allclose(found, values[0] / values[[17, 15, 19]], rtol=1e-9)
    assert condition_numbers(torch.diag(torch.tensor([1.0, 1.0, 0.0])), (100,)) == (float("inf"),)
