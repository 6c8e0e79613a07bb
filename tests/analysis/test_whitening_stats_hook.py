"""The training hook: when it observes, what it logs, and which layer it blames."""

import logging

import pytest
import torch
from detectron2.utils.events import EventStorage

from gw_detectron.analysis import WhiteningStatsHook
from gw_detectron.analysis.whitening_statistics import REDUCTIONS, reduce_statistics, whitening_statistics
from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d

from .test_whitening_statistics import correlated


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


def test_a_model_without_whitening_layers(caplog):
    hook = WhiteningStatsHook(period=2)
    for model, warnings in ((Model(), 0), (torch.nn.Conv2d(3, 3, 1), 1)):
        hook.trainer = type("Trainer", (), {"model": model})()
        with caplog.at_level(logging.WARNING):
            hook.before_train()
        assert caplog.text.count("no whitening layers") == warnings


def test_the_layer_that_is_not_finite_is_named(step):
    with torch.no_grad():
        step.model.first.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"whitening layer \('first'\): its weight is not finite"):
        step(0, correlated(2, 8, 5))
    assert not step.model.second[0]._forward_hooks  # the search for the cause is not disturbed
    with pytest.raises(FloatingPointError, match=r"\('first'\): its input is not finite"):
        step(0, torch.full((2, 8, 5), float("inf")))


def test_a_period_that_is_not_positive():
    with pytest.raises(ValueError, match=r"--whitening-stats-period \(-1\): too small"):
        WhiteningStatsHook(-1)
