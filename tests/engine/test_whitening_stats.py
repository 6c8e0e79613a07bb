"""Whitening statistics against NumPy; when the hook observes, what it logs, and which layer it names."""

import numpy as np
import pytest
import torch
from detectron2.utils.events import EventStorage

from gw_detectron.engine.hooks import WhiteningStatsHook
from gw_detectron.engine.whitening_stats import (
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_changes_nothing(dtype):
    layer = GroupWhitening2d(8, num_groups=4)
    x = correlated(2, 8, 6, 6) * 200  # whose squares float16 cannot hold
    expected = whitening_statistics(layer, x)
    with torch.autocast("cpu", dtype):
        found = whitening_statistics(layer, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GroupWhitening2d(8, num_groups=4)
        self.second = torch.nn.Sequential(BatchWhitening2d(8, channels_per_group=4))

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.fixture
def step():
    """A function that makes one step of a training and returns the scalars it has left."""
    model = Model()
    hook = WhiteningStatsHook(period=2)
    hook.trainer = type("Trainer", (), {"model": model, "iter": 0})()

    def run(iteration: int, x: torch.Tensor) -> dict[str, float]:
        hook.trainer.iter = iteration
        with EventStorage(iteration) as storage:
            hook.before_step()
            model(x)
            hook.after_step()
            return {name: value for name, (value, _) in storage.latest().items()}

    run.model, run.hook = model, hook
    return run


def test_numbers_are_written_every_period(step):
    x = correlated(2, 8, 5)
    scalars = step(0, x)
    assert {name.split("/")[1] for name in scalars} == {"first", "second.0"}
    expected = reduce_statistics([whitening_statistics(step.model.first, x)])
    assert {name: scalars[f"whitening/first/{name}"] for name in REDUCTIONS} == pytest.approx(expected)
    assert step(1, x) == {} and step(2, x)
    assert not step.model.first._forward_hooks and not step.model._forward_hooks


def test_only_the_models_own_step_is_looked_at(step):
    model, hook, own = step.model, step.hook, correlated(2, 8, 5)
    expected = reduce_statistics([whitening_statistics(model.first, own)])
    with EventStorage() as storage:
        hook.before_step()
        model.eval()(correlated(2, 8, 5, seed=1))  # an evaluation in another hook's before_step
        assert storage.latest() == {}
        model.train()(own)
        for training in (False, True):  # EvalHook and PreciseBN, in their after_step
            model.train(training)(correlated(2, 8, 5, seed=2))
        hook.after_step()
        found = {name: storage.latest()[f"whitening/first/{name}"][0] for name in REDUCTIONS}
    assert found == pytest.approx(expected)
    assert not model.first._forward_hooks and not model._forward_hooks


def test_the_layer_whose_covariance_overflows_is_named(step):
    step.model.first = GroupWhitening2d(8, num_groups=4, solver="standardize")
    with pytest.raises(FloatingPointError, match=r"whitening layer \('first'\): the covariance of its input"):
        step(0, correlated(2, 8, 5) * 1e20)
    assert not step.model.first._forward_hooks and not step.model._forward_hooks


def test_the_layer_that_is_not_finite_is_named(step):
    with torch.no_grad():
        step.model.first.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"whitening layer \('first'\): its weight is not finite"):
        step(0, correlated(2, 8, 5))
    assert not step.model.second[0]._forward_hooks  # the search for the cause is not disturbed
    with pytest.raises(FloatingPointError, match=r"\('first'\): its input is not finite"):
        step(0, torch.full((2, 8, 5), float("inf")))
