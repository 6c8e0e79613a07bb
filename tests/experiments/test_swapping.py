"""A network learns behind ZCA whitening and not behind PCA whitening, whose axes swap."""

import pytest
import torch

from experiments.swapping import analyze_swapping, swapped_fraction


@pytest.fixture(scope="module")
def result():
    return analyze_swapping(neurons=40, examples=600, steps=40, depths=(4,), seed=0)


def test_all_findings_hold(result):
    assert len(result.findings) == 5 and all(result.findings.values()), result.findings


def test_swapped_fraction_counts_permuted_neurons():
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    assert swapped_fraction(x, -3 * x + 1) == 0
    assert swapped_fraction(x, x[:, [1, 0, 2, 3, 4]]) == pytest.approx(2 / 5)
