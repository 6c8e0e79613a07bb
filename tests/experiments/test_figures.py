"""What the papers say of their figures holds in small versions of them."""

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from scipy.stats import entropy as scipy_entropy

from experiments.conditioning import analyze_conditioning, condition_numbers
from experiments.diversity import analyze_diversity, entropy
from experiments.overview import draw
from experiments.swapping import analyze_swapping

from ..tiny_run import ROOT

SMALL = {"examples": 19200, "bins": 100, "pairs": 2, "sizes": (2, 3, 4, 8, 24), "histogram_examples": 240}


@pytest.mark.parametrize(
    ("analyze", "options"),
    [
        (analyze_conditioning, {"layers": (1, 2), "repeats": 1}),
        (analyze_swapping, {"neurons": 40, "examples": 600, "steps": 40, "depths": (4,)}),
        (analyze_diversity, SMALL),
    ],
)
def test_the_findings_hold(analyze, options):
    result = analyze(**options, seed=0)
    assert result.rows and result.findings and all(result.findings.values()), result.findings


def test_condition_number_and_entropy_by_definition():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 20))
    values = np.sort(np.linalg.eigvalsh(x.T @ x))[::-1]
    found = condition_numbers(torch.from_numpy(x.T @ x), (90, 80, 100))
    np.testing.assert_allclose(found, values[0] / values[[17, 15, 19]], rtol=1e-9)
    points = 2 * rng.random((5000, 2)) ** 2 - 1
    counts, _, _ = np.histogram2d(*points.T, bins=50, range=[[-1, 1], [-1, 1]])
    assert entropy(torch.from_numpy(points), 50) == pytest.approx(scipy_entropy(counts.ravel()), rel=1e-3)


def test_the_overview_of_the_readme_is_drawn_from_the_study():
    figure = draw(ROOT / "experiments" / "small_batch" / "results.jsonl")
    assert len(figure.findobj(Rectangle)) > 12 and len(figure.axes) == 5  # bars; three maps, their scale, the bars
