"""The plan of a comparison, and what it says of its results; without any training."""

import json
import math

import pytest
from scipy import stats

from gw_detectron.config import default_config
from gw_detectron.errors import ConfigError
from gw_detectron.workbench.compare.page import write_comparison
from gw_detectron.workbench.compare.plan import Job, Plan, norm_keys, schedule_keys
from gw_detectron.workbench.compare.verdict import advise, paired_difference

NORMS = ("BN", "GN", "GW")
BEST = {"BN": 0.01, "GN": 0.02, "GW": 0.08}
TIMES = {"BN": 0.1, "GN": 0.1, "GW": 0.15}


def ap_of(job):
    """AP that grows with the length, with the same small effect of a seed on all norms."""
    rates = abs(math.log2(job.rate / BEST[job.norm]))
    return max(
        0.0,
        {"BN": 20, "GN": 24, "GW": 30}[job.norm]
        + job.iterations / 100
        - 4 * rates
        + 0.1 * job.seed**2,
    )


def finished(plan, seeds):
    """Run a plan as the command does: what is known, until nothing is left."""
    ap = {}
    while new := [job for job in plan.jobs(ap, seeds) if job not in ap]:
        ap[new[0]] = ap_of(new[0])  # one at a time: the order of the ends must not matter
    return ap


def test_halving_finds_the_best_rate_and_scores_each_seed_once():
    plan = Plan(NORMS, (0.01, 0.02, 0.04, 0.08), 400, TIMES)
    ap = finished(plan, 3)
    for norm in NORMS:
        search = [job for job in ap if job.norm == norm and job.seed == 0]
        assert [job.iterations for job in search] == [100] * 4 + [200] * 2
        scored = {
            (job.rate, job.seed, job.iterations) for job in ap if job.norm == norm and job.seed
        }
        lengths = [400] if norm == "GW" else [400, 600]  # 1.5 times as many in the time of GW
        assert scored == {
            (BEST[norm], seed, length) for seed in (1, 2, 3) for length in lengths
        }
        own = sum(job.iterations for job in ap if job.norm == norm)
        assert sum(job.iterations for job in plan.runs(norm, 3)) == own
    seeds = [job.seed for job in ap if job.seed]
    assert seeds == sorted(seeds)  # an interruption leaves whole rounds


def test_of_equal_rates_the_lowest_is_chosen():
    plan = Plan(NORMS, (0.04, 0.01, 0.02), 40, {})
    ap = dict.fromkeys(plan.search("GN", {})[0], 5.0)
    jobs, rate = plan.search("GN", ap)
    assert {job.rate for job in jobs[3:]} == {0.01, 0.02} and rate is None
    assert plan.search("GN", ap | dict.fromkeys(jobs, 5.0))[1] == 0.01


def test_norm_names():
    def values(name):
        keys = norm_keys(name)
        return [
            keys.get(f"MODEL.RESNETS.{key}")
            for key in ("NORM", "WHITEN_POSITIONS", "WHITEN_NORM", "CONV")
        ]

    assert values("GW:iters=3") == ["GW:iters=3", "", None, ""]
    assert values("GN+WS") == ["GN", "", None, "WS"]
    assert values("BN+GW:groups=32@S1-B1+WS") == ["BN", "S1-B1", "GW:groups=32", "WS"]
    for wrong in (
        "GX",
        "BN+GW",
        "BN@S1",
        "BN+GW@",
        "BN+@S1",
        "BN+GW@S9",
        "GW:steps=3",
        "+WS",
        "SOLVER.MAX_ITER",
    ):
        with pytest.raises(ConfigError, match=wrong.replace("+", r"\+")):
            norm_keys(wrong)


def test_a_schedule_keeps_its_shape():
    cfg = default_config()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS = 1000, (500, 900), 100
    short, long = schedule_keys(cfg, 100, 1), schedule_keys(cfg, 4000, 4)
    assert (short["SOLVER.STEPS"], short["SOLVER.WARMUP_ITERS"]) == ((50, 90), 10)
    assert (long["SOLVER.STEPS"], long["SOLVER.WARMUP_ITERS"]) == ((2000, 3600), 400)
    assert schedule_keys(cfg, 2, 1)["SOLVER.STEPS"] == (
        1,
    )  # Detectron2 refuses a step at 0, at the end, or twice


def test_a_difference_is_that_of_the_paired_t_test():
    first, second = {1: 30.0, 2: 32.0, 3: 31.5, 9: 0.0}, {3: 30.0, 2: 31.0, 1: 28.0, 8: 99.0}
    found = paired_difference(first, second)
    interval = stats.ttest_rel([30.0, 32.0, 31.5], [28.0, 31.0, 30.0]).confidence_interval(0.95)
    assert found.mean == pytest.approx(1.5) and found.seeds == 3
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-3)
    assert paired_difference({1: 3.0}, {1: 1.0}) == (2.0, None, None, 1)
    assert paired_difference({1: 3.0}, {2: 1.0}) is None


@pytest.mark.parametrize(
    ("table", "take"),
    [
        ({"BN": {1: 20.0, 2: 21.0}, "GW": {1: 30.0, 2: 31.1}}, "GW"),  # surely ahead
        (
            {"BN": {1: 29.0, 2: 33.0}, "GW": {1: 31.0, 2: 32.0}},
            "BN",
        ),  # not surely, and close: the faster one
        ({"BN": {1: 27.0, 2: 33.0}, "GW": {1: 31.0, 2: 32.0}}, "GW"),  # not surely, but 1.5 AP
        (
            {"BN": {1: 50.0, 2: 0.0, 3: 51.0}, "GW": {1: 49.0, 2: 50.0, 3: 49.0}},
            "GW",
        ),  # a run has diverged
        ({"BN": {1: 20.0, 2: 21.0}, "GN": {1: 30.0, 2: 31.0}, "GW": {1: 30.9, 2: 30.8}}, "GN"),
        ({"BN": {1: 20.0}, "GW": {1: 30.0}}, "GW"),  # one seed: the higher one, and it says so
        ({"BN": {1: 0.0}, "GW": {1: 0.0}}, ""),
        ({"BN": {1: 9.0}, "GW": {2: 8.0}}, ""),
        ({"BN": {1: 9.0}}, ""),
    ],
)
def test_the_advice_follows_from_the_numbers(table, take):
    found, text = advise(table, TIMES, "equal time")
    assert found == take and ("one seed" in text) == bool(take and len(table[take]) == 1)


def test_the_page_of_a_comparison(tmp_path):
    plan = Plan(NORMS, (0.01, 0.02, 0.04, 0.08), 400, TIMES)
    results = {
        job: {
            "AP": ap,
            "score": "bbox/AP",
            "diverged": "",
            "curve": [[job.iterations // 2, ap / 2], [job.iterations, ap]],
        }
        for job, ap in finished(plan, 3).items()
    }
    diverged = Job("BN", 0.08, 0, 100)
    results[diverged]["diverged"] = "the loss is <b>nan</b>"
    numbers = write_comparison(tmp_path, plan, TIMES, results)
    written = json.loads((tmp_path / "comparison.json").read_text(), parse_constant=pytest.fail)
    assert (
        written["advice"] == numbers["advice"]
        and written["differences"] == numbers["differences"]
    )
    assert (
        numbers["recommended"] == {"norm": "GW", "rate": 0.08}
        and numbers["norms"]["GW"]["rate_at_the_edge"]
    )
    difference = numbers["differences"]["equal time"]["GW - GN"]
    assert difference["mean"] == pytest.approx(30 + 4 - 24 - 6) and difference["seeds"] == 3
    page = (tmp_path / "comparison.html").read_text()
    assert (
        page.count("data:image/png") == 2 and "&lt;b&gt;nan" in page and diverged.name in page
    )
