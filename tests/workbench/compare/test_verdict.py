"""What a comparison says of its results, and its page."""

import json

import pytest
from scipy import stats

from gw_detectron.workbench.compare.plan import Job, Plan
from gw_detectron.workbench.compare.verdict import advise, paired_difference, summarize
from gw_detectron.workbench.compare.verdict_page import verdict_sections
from gw_detectron.workbench.report.html import write_page

from .fake_results import NORMS, TIMES, finished


def test_a_difference_is_that_of_the_paired_t_test():
    first = {1: 30.0, 2: 32.0, 3: 31.5, 9: 0.0}
    second = {3: 30.0, 2: 31.0, 1: 28.0, 8: 99.0}
    difference = paired_difference(first, second)

    test = stats.ttest_rel([30.0, 32.0, 31.5], [28.0, 31.0, 30.0])
    low, high = test.confidence_interval(0.95)
    assert difference.mean == pytest.approx(1.5)
    assert difference.low == pytest.approx(low, rel=1e-3)
    assert difference.high == pytest.approx(high, rel=1e-3)
    assert difference.seeds == 3


def test_a_difference_needs_common_seeds():
    assert paired_difference({1: 3.0}, {1: 1.0}) == (2.0, None, None, 1)
    assert paired_difference({1: 3.0}, {2: 1.0}) is None


CASES = {
    "surely ahead": ("GW", {"BN": [20.0, 21.0], "GW": [30.0, 31.1]}),
    "not surely, and close: the faster one": (
        "BN",
        {"BN": [29.0, 33.0], "GW": [31.0, 32.0]},
    ),
    "not surely, but 1.5 AP": ("GW", {"BN": [27.0, 33.0], "GW": [31.0, 32.0]}),
    "a run has diverged": ("GW", {"BN": [50.0, 0.0, 51.0], "GW": [49.0, 50.0, 49.0]}),
    "three norms": ("GN", {"BN": [20.0, 21.0], "GN": [30.0, 31.0], "GW": [30.9, 30.8]}),
    "one seed: the higher one": ("GW", {"BN": [20.0], "GW": [30.0]}),
    "AP 0": ("", {"BN": [0.0], "GW": [0.0]}),
    "one norm": ("", {"BN": [9.0]}),
}


@pytest.mark.parametrize(("take", "scores"), CASES.values(), ids=CASES)
def test_the_advice_follows_from_the_numbers(take, scores):
    table = {}
    for norm, values in scores.items():
        table[norm] = dict(enumerate(values, 1))
    advised, text = advise(table, TIMES, "equal time")

    assert advised == take
    is_one_seed = take and len(table[take]) == 1
    assert ("one seed" in text) == bool(is_one_seed)


def test_other_seeds_are_not_compared():
    assert advise({"BN": {1: 9.0}, "GW": {2: 8.0}}, TIMES, "equal time")[0] == ""


def test_the_numbers_and_the_page_of_a_comparison(tmp_path):
    plan = Plan(NORMS, (0.01, 0.02, 0.04, 0.08), 400, TIMES)
    results = {}
    for job, ap in finished(plan, 3).items():
        results[job] = {
            "AP": ap,
            "score": "bbox/AP",
            "diverged": "",
            "curve": [[job.iterations // 2, ap / 2], [job.iterations, ap]],
        }
    diverged = Job("BN", 0.08, 0, 100)
    results[diverged]["diverged"] = "the loss is <b>nan</b>"

    numbers = summarize(plan, results)
    assert numbers["recommended"] == {"norm": "GW", "rate": 0.08}
    assert numbers["norms"]["GW"]["rate_at_the_edge"]
    difference = numbers["differences"]["equal time"]["GW - GN"]
    assert difference["mean"] == pytest.approx(30 + 4 - 24 - 6)
    assert difference["seeds"] == 3
    json.dumps(numbers, allow_nan=False)

    sections = verdict_sections(numbers, plan, results)
    write_page(tmp_path / "page.html", "Comparison", sections)
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png") == 2
    assert "&lt;b&gt;nan" in page
    assert diverged.name in page
    assert numbers["advice"] in page
