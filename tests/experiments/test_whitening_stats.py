"""Whitening statistics against NumPy."""

import numpy as np
import pytest
import torch

from experiments.whitening_stats import (
    REDUCTIONS,
    reduce_statistics,
    whitening_statistics,
)
from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d


def correlated(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    mix = torch.randn(shape[1], shape[1], generator=generator)
    return torch.einsum("oc,nc...->no...", mix, x) + 2


def numpy_statistics(rows: np.ndarray, whitened: np.ndarray, eps: float) -> dict[str, float]:
    """Compute the statistics from a layer's input matrix and its whitened output, W times the centered input."""
    centered = rows - rows.mean(1, keepdims=True)
    s = centered @ centered.T / rows.shape[1] + eps * np.eye(len(rows))
    w = np.linalg.lstsq(centered.T, whitened.T, rcond=None)[0].T
    values, vectors = np.linalg.eigh(s)
    exact = vectors / np.sqrt(values) @ vectors.T
    after = w @ s @ w.T
    return {
        "lambda_min": values[0],
        "lambda_max": values[-1],
        "trace": np.trace(s),
        "condition_before": np.linalg.cond(s),
        "condition_after": np.linalg.cond(after),
        "residual": np.linalg.norm(after - np.eye(len(s))) / np.sqrt(len(s)),
        "distance": np.linalg.norm(w - exact) / np.linalg.norm(exact),
    }


def check(layer, x, matrices, eps=1e-5):
    found = whitening_statistics(layer, x)
    assert all(len(found[name]) == len(matrices) for name in REDUCTIONS)
    for place, (before, after) in enumerate(matrices):
        for name, value in numpy_statistics(before, after, eps).items():
            assert float(found[name][place]) == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("solver", ["newton", "zca"])
def test_group_whitening(solver):
    layer = GroupWhitening2d(12, num_groups=4, solver=solver, eps=1e-2)
    x = correlated(3, 12, 5, 4).double()
    y = layer(x).detach()
    pairs = [(a.reshape(4, -1).numpy(), b.reshape(4, -1).numpy()) for a, b in zip(x, y, strict=True)]
    check(layer, x, pairs, eps=1e-2)
    assert len(whitening_statistics(layer, x, samples=2)["trace"]) == 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("running", ["matrix", "covariance"])
def test_batch_whitening(training, running):
    layer = BatchWhitening2d(5, channels_per_group=3, running=running, momentum=0.5)
    for seed in (1, 2):
        layer(correlated(4, 5, 6, seed=seed))
    layer.double().train(training)
    x = correlated(4, 5, 6).double()
    rows = x.transpose(0, 1).flatten(1)
    with torch.no_grad():
        y = layer(x).transpose(0, 1).flatten(1)
    y = y - y.mean(1, keepdim=True)  # in evaluation it is the running mean that is taken away
    pairs = [(rows[:3].numpy(), y[:3].numpy()), (rows[3:].numpy(), y[3:].numpy())]
    check(layer, x, pairs)


def test_singular_and_empty_input():
    layer, empty = GroupWhitening2d(8, num_groups=8), torch.empty(0, 8, 3)
    calls = [whitening_statistics(layer, x) for x in (torch.zeros(2, 8, 3), empty)]
    assert all(np.isfinite(value) for value in reduce_statistics(calls).values())
    assert reduce_statistics([whitening_statistics(layer, empty)]) == dict.fromkeys(REDUCTIONS)
    cholesky = GroupWhitening2d(8, 8, solver="cholesky")
    assert reduce_statistics([whitening_statistics(cholesky, correlated(2, 8, 9))])["distance"] is None
