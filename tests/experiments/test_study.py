"""Test what studies share, and the start weights of the study of BN weights."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from experiments.bn_weights.convert_run import convert_calibrated
from experiments.bn_weights.imagenet import ARMS, EfficientNetLite, prepare_start
from experiments.study import ResultsFile, climb, score_arms
from gw_detectron import GroupWhitening2d, norm_spec


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


@pytest.fixture(scope="module")
def lite_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    network = EfficientNetLite().network.train()
    network(torch.randn(4, 3, 64, 64))  # statistics of its own
    path = tmp_path_factory.mktemp("weights") / "lite.pth"
    # the file has other names, and the layers of the classifier after these
    stored = [*network.state_dict().values(), torch.zeros(1000)]
    torch.save({str(number): value for number, value in enumerate(stored)}, path)
    return str(path)


@pytest.mark.parametrize("arm", ["FrozenBN", "FrozenBN, adapted"])
def test_start_from_bn_weights(lite_weights: str, arm: str) -> None:
    images = torch.randn(8, 3, 64, 64) + 1
    start = EfficientNetLite()
    prepare_start(start.network, ARMS[arm], lite_weights, images)

    expected = EfficientNetLite().eval()
    stored = torch.load(lite_weights).values()
    names = expected.network.state_dict()
    expected.network.load_state_dict(dict(zip(names, stored, strict=False)))

    difference = start(images)["stride8"] - expected(images)["stride8"]
    assert (difference.abs().max() < 1e-4) == (arm == "FrozenBN")
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in start.modules())


@pytest.mark.parametrize("arm", ["MixBN 0.5", "MixGW 0.5", "GW, converted"])
def test_first_norm_of_each_block_is_replaced(lite_weights: str, arm: str) -> None:
    start = EfficientNetLite()
    prepare_start(start.network, ARMS[arm], lite_weights, torch.randn(8, 3, 64, 64))

    kind = ARMS[arm].norm.partition(":")[0]
    places = [
        name
        for name, layer in start.network.named_modules()
        if (norm_spec(layer) or "").partition(":")[0] == kind
    ]
    assert len(places) == 15
    assert all(name.endswith("bn1") for name in places)
