"""What the papers say of their figures holds in small versions of them."""

import json

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle

from experiments import overview
from experiments.__main__ import analyze, get_parser
from experiments.conditioning import condition_numbers
from experiments.real_images import figure as real_images

from ..tiny_run import ROOT


@pytest.mark.parametrize(
    "words",
    [
        "conditioning --layers 1 2 --repeats 1",
        "swapping --neurons 40 --examples 600 --steps 40 --depths 4",
    ],
)
def test_the_findings_hold(words):
    result = analyze(get_parser().parse_args(words.split()))

    assert result.rows
    assert result.findings
    assert all(result.findings.values()), result.findings
    assert result.settings["seed"] == 0


def test_condition_number_by_definition():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 20))
    covariance = x.T @ x
    values = np.linalg.eigvalsh(covariance)

    numbers = condition_numbers(torch.from_numpy(covariance), (90, 80, 100))

    of_percents = values[[2, 4, 0]]
    np.testing.assert_allclose(numbers, values[-1] / of_percents, rtol=1e-9)


def test_the_overview_of_the_readme_is_drawn_from_the_study():
    figure = overview.draw(ROOT / "experiments" / "small_batch" / "results.jsonl")
    assert len(figure.axes) == 5  # three maps, their scale, the bars
    assert len(figure.findobj(Rectangle)) > 12


def test_ap_is_drawn_from_results_of_today_and_of_the_study(tmp_path):
    runs = [
        {"norm": "GN", "seed": 0, "score": "segm/AP@300", "AP": 90.0},
        {"norm": "GN", "seed": 1, "score": "segm/AP@300", "AP": 30.0},
        {"norm": "GN", "seed": 2, "score": "segm/AP@300", "AP": 40.0},
        {"norm": "GW", "seed": 1, "score": "segm/AP@300", "AP": 50.0},
    ]
    today = tmp_path / "results.jsonl"
    today.write_text("\n".join(map(json.dumps, runs)))
    study = ROOT / "experiments" / "real_images" / "bccd" / "results.jsonl"

    figure = real_images.draw([today, study])

    axes, of_study = figure.axes
    assert axes.get_xlabel() == "mask AP@300"
    assert [text.get_text() for text in axes.texts] == ["50.0", "35.0"]
    assert of_study.get_xlabel() == "box AP"
