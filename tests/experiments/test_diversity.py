"""Diversity collapses over few numbers; entropy and normalization against their definitions."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from experiments.diversity import analyze_diversity, entropy

SMALL = {"examples": 19200, "bins": 100, "pairs": 2, "sizes": (2, 3, 4, 8, 24), "histogram_examples": 240}


@pytest.fixture(scope="module")
def result():
    return analyze_diversity(**SMALL, seed=0)


@pytest.mark.parametrize("source", ["gaussian", "mlp"])
@pytest.mark.parametrize("scale", ["own", "one"])
@pytest.mark.parametrize(("method", "points"), [("GN", 3), ("BN", 9)])
def test_diversity_collapses_for_small_groups_and_batches(result, source, scale, method, points):
    rows = [row for row in result.rows if row["source"] == source]
    found = {row["size"]: row[f"diversity_{scale}"] for row in rows if row["method"] == method}
    base = next(row[f"diversity_{scale}"] for row in rows if row["method"] == "Base")
    assert found[2] < found[3] < found[4]
    assert found[2] < math.log(points) and found[2] < base
    if (source, scale) == ("gaussian", "one"):  # of all features of variance 1, Gaussian ones are the most diverse
        assert found[4] < found[8] == pytest.approx(base, rel=0.02)


def test_entropy_is_that_of_the_histogram():
    points = torch.rand(5000, 2, generator=torch.Generator().manual_seed(0)) ** 2 * 2 - 1
    counts, _, _ = np.histogram2d(*points.double().numpy().T, bins=50, range=[[-1, 1], [-1, 1]])
    assert entropy(points, 50) == pytest.approx(scipy_entropy(counts.ravel()), rel=1e-3)
    assert entropy(torch.zeros(10, 2), 50) == 0
    assert entropy(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), 50) == pytest.approx(math.log(2))
