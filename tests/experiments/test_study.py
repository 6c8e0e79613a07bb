"""Test what studies share, and the start weights of the study of BN weights."""

from pathlib import Path

import pytest
import torch
from torchvision.models import resnet18

from experiments.bn_weights.convert import convert_calibrated
from experiments.study import ResultsFile, climb, score_arms
from gw_detectron import GroupWhitening2d


def test_results_file_continues(tmp_path: Path) -> None:
    path = str(tmp_path / "results.csv")
    first = ResultsFile(path, ("arm", "seed"), ("AP",))
    first.append("GW:iters=2, small", 1, 48.25)

    second = ResultsFile(path, ("arm", "seed"), ("AP",))
    assert ("GW:iters=2, small", 1) in second
    assert ("GW:iters=2, small", 2) not in second
    second.append("GN", 2, 45.5)

    rows = ResultsFile(path, ("arm", "seed"), ("AP",)).rows
    assert rows["GW:iters=2, small", "1"]["AP"] == "48.25"
    assert rows["GN", "2"]["AP"] == "45.5"


def test_score_is_computed_once(tmp_path: Path) -> None:
    path = str(tmp_path / "results.csv")
    file = ResultsFile(path, ("arm",), ("AP", "seconds"))

    assert file.score(("GN",), lambda: 48.251) == 48.25
    assert file.score(("GN",), lambda: 12.0) == 48.25
    # of a detector that finds nothing
    assert file.score(("BN",), lambda: float("nan")) == 0

    again = ResultsFile(path, ("arm",), ("AP", "seconds"))
    assert again.score(("GN",), lambda: 12.0) == 48.25


def test_arms_are_scored_with_their_best_rates(tmp_path: Path) -> None:
    keys = ("norm", "rate", "seed")
    file = ResultsFile(str(tmp_path / "results.csv"), keys, ("AP", "seconds"))
    scores = {("GN", 0.01): 20.0, ("GN", 0.02): 30.0, ("GW", 0.01): 25.0}

    def run(norm: str, rate: float, seed: int) -> float:
        return scores.get((norm, rate), 0.0) + seed

    arms = [("GN",), ("GW",)]
    score_arms(file, arms, run, rates=(0.01, 0.02), seeds=(1, 2))

    assert [(*key, row["AP"]) for key, row in file.rows.items()] == [
        ("GN", "0.01", "0", "20.0"),
        ("GN", "0.02", "0", "30.0"),
        ("GW", "0.01", "0", "25.0"),
        ("GW", "0.02", "0", "0.0"),
        ("GN", "0.02", "1", "31.0"),
        ("GW", "0.01", "1", "26.0"),
        ("GN", "0.02", "2", "32.0"),
        ("GW", "0.01", "2", "27.0"),
    ]


@pytest.mark.parametrize(
    ("scores", "best", "tried"),
    [
        ((9.0, 5.0, 3.0, 1.0), 0.005, {0.005, 0.01, 0.02}),
        ((3.0, 5.0, 4.0, 1.0), 0.01, {0.005, 0.01, 0.02}),
        ((1.0, 3.0, 5.0, 4.0), 0.02, {0.01, 0.02, 0.04}),
        ((1.0, 3.0, 5.0, 6.0), 0.04, {0.01, 0.02, 0.04}),
    ],
)
def test_climb_stops_where_the_score_falls(
    scores: tuple[float, ...], best: float, tried: set[float]
) -> None:
    rates = (0.005, 0.01, 0.02, 0.04)
    seen = set()

    def score(rate: float) -> float:
        seen.add(rate)
        return scores[rates.index(rate)]

    assert climb(rates, score) == best
    assert seen == tried


def test_converted_network_has_unit_variance_after_whitening() -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=10).eval()
    images = torch.randn(4, 3, 64, 64)

    convert_calibrated(model, {"S1-B1": "GW"}, images)

    deviations = []

    def measure(
        layer: GroupWhitening2d, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> None:
        deviations.append(output.std().item())

    layers = [layer for layer in model.modules() if isinstance(layer, GroupWhitening2d)]
    for layer in layers:
        layer.register_forward_hook(measure)
    with torch.no_grad():
        model(images)
    # the scale of this BN is 1 everywhere
    assert len(layers) == 9
    torch.testing.assert_close(deviations, [1.0] * 9, rtol=1e-3, atol=0)
