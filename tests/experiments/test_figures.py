"""What the papers say of their figures holds in small versions of them."""

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle

from experiments.conditioning import analyze_conditioning, condition_numbers
from experiments.overview import draw
from experiments.swapping import analyze_swapping

from ..tiny_run import ROOT


@pytest.mark.parametrize(
    ("analyze", "options"),
    [
        (analyze_conditioning, {"layers": (1, 2), "repeats": 1}),
        (
            analyze_swapping,
            {"neurons": 40, "examples": 600, "steps": 40, "depths": (4,)},
        ),
    ],
)
def test_the_findings_hold(analyze, options):
    result = analyze(**options, seed=0)
    assert result.rows
    assert result.findings
    assert all(result.findings.values()), result.findings


def test_condition_number_by_definition():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 20))
    covariance = x.T @ x
    values = np.linalg.eigvalsh(covariance)

    numbers = condition_numbers(torch.from_numpy(covariance), (90, 80, 100))

    of_percents = values[[2, 4, 0]]
    np.testing.assert_allclose(numbers, values[-1] / of_percents, rtol=1e-9)


def test_the_overview_of_the_readme_is_drawn_from_the_study():
    figure = draw(ROOT / "experiments" / "small_batch" / "results.jsonl")
    assert len(figure.axes) == 5  # three maps, their scale, the bars
    assert len(figure.findobj(Rectangle)) > 12
