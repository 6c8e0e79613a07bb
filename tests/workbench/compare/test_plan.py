"""The plan of a comparison; without any training."""

import itertools
import re

import pytest

from gw_detectron.config import default_config
from gw_detectron.errors import ConfigError
from gw_detectron.workbench.compare.plan import (
    Costs,
    Job,
    Plan,
    norm_keys,
    schedule_keys,
)
from gw_detectron.workbench.compare.schedule import Schedule

from .fake_results import BEST, NORMS, TIMES, finished


def test_halving_finds_the_best_rate_and_scores_each_seed_once():
    plan = Plan(NORMS, (0.01, 0.02, 0.04, 0.08), 400, TIMES)
    ap = finished(plan, 3)

    for norm in NORMS:
        jobs = [job for job in ap if job.norm == norm]
        search = [job.iterations for job in jobs if job.is_search]
        assert search == [100] * 4 + [200] * 2

        # 1.5 times as many in the time of GW
        lengths = [400] if norm == "GW" else [400, 600]
        scored = [job for job in jobs if not job.is_search]
        assert {job.rate for job in scored} == {BEST[norm]}
        pairs = [(job.seed, job.iterations) for job in scored]
        assert pairs == list(itertools.product((1, 2, 3), lengths))

    planned = sum(job.iterations for job in plan.all_jobs(3))
    assert planned == sum(job.iterations for job in ap)
    seeds = [job.seed for job in ap if job.seed]
    assert seeds == sorted(seeds)  # an interruption leaves whole rounds


def test_of_equal_rates_the_lowest_is_chosen():
    plan = Plan(NORMS, (0.04, 0.01, 0.02), 40, TIMES)
    first, rate = plan.search("GN", {})
    assert rate is None

    jobs, rate = plan.search("GN", dict.fromkeys(first, 5.0))
    assert rate is None
    assert {job.rate for job in jobs[3:]} == {0.01, 0.02}

    _, rate = plan.search("GN", dict.fromkeys(jobs, 5.0))
    assert rate == 0.01


@pytest.mark.parametrize(("num_rates", "iterations"), [(9, 400), (17, 400), (5, 2)])
def test_many_rates_end_with_one_rung_of_full_length(num_rates, iterations):
    rates = [0.01 * number for number in range(1, num_rates + 1)]
    plan = Plan(NORMS, rates, iterations, TIMES)
    ap = finished(plan, 1)

    _, rate = plan.search("GN", ap)

    assert rate == pytest.approx(BEST["GN"])
    assert len(plan.all_jobs(1)) == len(ap)


def test_the_time_left_is_that_of_the_norms_that_have_not_failed():
    plan = Plan(["BN", "GN"], (0.01,), 100, {"BN": 1.0, "GN": 1.0})
    finished_run = {Job("BN", 0.01, 1, 100): {"seconds": 200, "AP": 1.0}}
    schedule = Schedule(
        plan, Costs(plan.times, 0.0, 0.0), 1, 1, 3, 0, 0.0, finished_run, {"BN"}
    )

    # a run of BN took twice the estimate, and three runs of GN are left
    assert schedule.seconds_left(3) == pytest.approx(3 * 200)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("GW:iters=3", ["GW:iters=3", "", None, ""]),
        ("GN+WS", ["GN", "", None, "WS"]),
        ("BN+GW:groups=32@S1-B1+WS", ["BN", "S1-B1", "GW:groups=32", "WS"]),
    ],
)
def test_norm_names(norm, expected):
    keys = norm_keys(norm)

    names = ("NORM", "WHITEN_POSITIONS", "WHITEN_NORM", "CONV")
    assert [keys.get(f"MODEL.RESNETS.{name}") for name in names] == expected


@pytest.mark.parametrize(
    "norm",
    [
        "GX",
        "BN+GW",
        "BN@S1",
        "BN+GW@",
        "BN+@S1",
        "BN+GW@S9",
        "GW:steps=3",
        "+WS",
        "SEED",
    ],
)
def test_other_norm_names_are_refused(norm):
    with pytest.raises(ConfigError, match=re.escape(norm)):
        norm_keys(norm)


def test_a_schedule_keeps_its_shape():
    cfg = default_config()
    cfg.SOLVER.MAX_ITER = 1000
    cfg.SOLVER.STEPS = (500, 900)
    cfg.SOLVER.WARMUP_ITERS = 100

    short = schedule_keys(cfg, 100, 1)
    assert short["SOLVER.STEPS"] == (50, 90)
    assert short["SOLVER.WARMUP_ITERS"] == 10
    long = schedule_keys(cfg, 4000, 4)
    assert long["SOLVER.STEPS"] == (2000, 3600)
    assert long["SOLVER.WARMUP_ITERS"] == 400
    # Detectron2 refuses a step at 0, at the end, or twice
    assert schedule_keys(cfg, 2, 1)["SOLVER.STEPS"] == (1,)
