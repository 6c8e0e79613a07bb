"""A network learns behind ZCA whitening and not behind PCA whitening, whose axes swap."""

import math

import pytest
import torch

from experiments.swapping import WhitenedMLP, _last, analyze_swapping, swapped_fraction, train


@pytest.fixture(scope="module")
def result():
    return analyze_swapping(neurons=40, examples=600, steps=40, depths=(4,), seed=0)


def test_pca_does_not_learn_where_zca_does(result):
    last = {row["method"]: row["loss"] for row in result.rows}
    assert last["zca"] < 0.1 * math.log(10)
    assert last["pca"] > 0.9 * math.log(10)
    assert last["pca"] > last["plain"]


def test_the_axes_of_pca_swap(result):
    parts = {}
    for row in result.rows:
        if row["step"]:
            parts.setdefault(row["method"], []).append(row["swapped"])
    assert sum(parts["pca"]) / len(parts["pca"]) > 0.1
    assert max(parts["zca"]) == 0


def test_all_findings_hold(result):
    assert len(result.findings) == 5 and all(result.findings.values()), result.findings


@pytest.mark.parametrize("method", ["pca", "zca"])
def test_hidden_layers_are_white(method):
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    first = WhitenedMLP([6, 6, 3], method, seed=0).first_layer(x, x)
    torch.testing.assert_close(first.T @ first / len(x), torch.eye(6), atol=2e-3, rtol=0)


def test_a_probe_is_whitened_by_the_batch():
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    network = WhitenedMLP([6, 6, 3], "zca", seed=0)
    torch.testing.assert_close(network.first_layer(x, x)[:10], network.first_layer(x[:10], x))


def test_swapped_fraction_counts_permuted_neurons():
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    assert swapped_fraction(x, -3 * x + 1) == 0
    assert swapped_fraction(x, x[:, [1, 0, 2, 3, 4]]) == pytest.approx(2 / 5)


def test_training_that_diverges_ends():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 4, generator=generator), torch.arange(50) % 3
    losses, swapped = train(WhitenedMLP([4, 4, 3], "plain", 0), x, y, 1e20, 100, 0, 0)
    assert len(losses) == len(swapped) < 10
    losses, _ = train(WhitenedMLP([4, 4, 3], "zca", 0), x, y, 0.5, 30, 25, 0)
    assert len(losses) == 30 and losses[-1] < losses[0]


def test_the_final_loss_is_the_mean_of_the_last_steps():
    assert _last([9.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == 3
    assert _last([2.0, 4.0]) == 3
    assert _last([2.0, float("nan")]) == math.inf


def test_invalid_sizes():
    with pytest.raises(ValueError, match="batch_size=9999"):
        analyze_swapping(batch_size=9999)
