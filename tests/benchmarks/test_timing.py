"""Contenders take turns, and what the machine does in the meantime hits all of them. No test here looks at a clock."""

import gc

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import WARM_UP, Step, alternate, runs

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the steps move."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    return now


def test_every_round_runs_every_step_and_each_follows_each_other():
    def order(repeats):
        calls: list[str] = []
        alternate({name: Step(lambda name=name: calls.append(name)) for name in "abc"}, repeats, CPU)
        assert "".join(calls[: 3 * WARM_UP]) == "a" * WARM_UP + "b" * WARM_UP + "c" * WARM_UP
        return "".join(calls[3 * WARM_UP :])

    found = order(40)
    assert all(sorted(found[i : i + 3]) == ["a", "b", "c"] for i in range(0, len(found), 3))
    followed = [found.count(pair) for pair in ("ab", "ac", "ba", "bc", "ca", "cb")]
    assert min(followed) > 8
    assert found == order(40)


def test_quantiles_in_milliseconds_without_preparation_and_warm_up(clock):
    seconds = iter([100.0] * WARM_UP + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def run():
        clock[0] += next(seconds)

    def prepare():
        clock[0] += 50.0

    found = alternate({"only": Step(run, prepare)}, 6, CPU)["only"]
    assert found == pytest.approx((2000.0, 3500.0, 5000.0))


def test_a_drift_of_the_machine_changes_no_ratio(clock):
    def step(cost):
        def run():
            clock[0] += cost * (1.0 + clock[0] / 4.0)  # everything becomes slower and slower

        return Step(run)

    found = alternate({"one": step(0.01), "two": step(0.02)}, 200, CPU)
    assert found["two"].median / found["one"].median == pytest.approx(2.0, rel=0.02)
    assert found["one"].q80 > 1.5 * found["one"].q20


def test_each_run_is_told_and_garbage_collection_comes_back():
    ticks = []
    collecting = []
    alternate({name: Step(lambda: collecting.append(gc.isenabled())) for name in "ab"}, 3, CPU, lambda: ticks.append(1))
    assert len(ticks) == 2 * runs(3)
    assert collecting[2 * WARM_UP :] == [False] * 6
    assert gc.isenabled()
