"""Timing in alternating rounds. No test depends on a real clock."""

import gc
from collections import Counter
from itertools import pairwise

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import WARM_UP, Step, balanced_orders, time_alternating

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the steps advance."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("n", range(9))
def test_each_step_follows_every_other_equally_often(n):
    orders = balanced_orders(n)
    assert all(sorted(order) == list(range(n)) for order in orders)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == n * (n - 1) and len(set(followed.values())) <= 1


def test_every_round_runs_every_step():
    def order(repeats):
        calls: list[str] = []
        collecting: list[bool] = []

        def run(name):
            calls.append(name)
            collecting.append(gc.isenabled())

        time_alternating({name: Step(lambda name=name: run(name)) for name in "abc"}, repeats, CPU)
        assert "".join(calls[: 3 * WARM_UP]) == "a" * WARM_UP + "b" * WARM_UP + "c" * WARM_UP
        assert not any(collecting[3 * WARM_UP :]) and gc.isenabled()
        return "".join(calls[3 * WARM_UP :])

    found = order(40)
    assert all(sorted(found[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(found), 3))
    followed = [found.count(pair) for pair in ("ab", "ac", "ba", "bc", "ca", "cb")]
    assert min(followed) > 8


def test_quantiles_in_milliseconds_without_preparation_and_warm_up(clock):
    seconds = iter([100.0] * WARM_UP + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def run():
        clock[0] += next(seconds)

    def prepare():
        clock[0] += 50.0

    found = time_alternating({"only": Step(run, prepare)}, 6, CPU)["only"]
    assert found == pytest.approx({"repeats": 6, "q20_ms": 2000.0, "median_ms": 3500.0, "q80_ms": 5000.0})


def test_a_drift_of_the_machine_does_not_change_ratios(clock):
    def step(cost):
        def run():
            clock[0] += cost * (1.0 + clock[0] / 4.0)  # slower and slower

        return Step(run)

    found = time_alternating({"one": step(0.01), "two": step(0.02)}, 200, CPU)
    assert found["two"]["median_ms"] / found["one"]["median_ms"] == pytest.approx(2.0, rel=0.02)
    assert found["one"]["q80_ms"] > 1.5 * found["one"]["q20_ms"]
