"""The page of a comparison: its verdict on top of the page about several runs."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from ..report.comparison_page import Curve, comparison_sections
from ..report.page_parts import Section, Table
from .plan import SEARCH_SEED, Job, Plan
from .verdict import ITERATIONS, Difference, Results

_CURVES = (
    "Means over the seeds. A dashed line is the longer training of a faster norm, for equal time: "
    "as much as the slowest norm took. ± is the standard deviation over the seeds."
)
_DIFFERENCES = (
    "AP of the row minus AP of the column, mean over common seeds, with the 95 % interval of the "
    "paired t test. It contains the variation between seeds, not between images."
)
_RATES = (
    "AP with seed 0. The better half of the rates goes on to runs of twice the length."
)


def verdict_sections(
    numbers: Mapping[str, Any], plan: Plan, results: Results
) -> dict[str, Section]:
    """Return the sections of the page: ``numbers`` are those of ``comparison.json``."""
    sections = comparison_sections(
        [_overview(numbers)],
        _mean_curves(plan, results),
        verdict=numbers["advice"],
        note=_CURVES,
    )
    tables = [
        _difference_table(criterion, plan.norms, differences)
        for criterion, differences in numbers["differences"].items()
    ]
    sections["Differences"] = Section(text=_DIFFERENCES, tables=tables)
    if len(plan.rates) > 1:
        sections["Learning rates"] = Section(
            text=_RATES, tables=[_rate_table(plan, results)]
        )

    diverged = [
        (f"{job.name}: {result['diverged']}",)
        for job, result in results.items()
        if result["diverged"]
    ]
    if diverged:
        sections["Diverged"] = Section(text="AP 0 each.", tables=[Table([], diverged)])
    return sections


def _overview(numbers: Mapping[str, Any]) -> Table:
    """List the norms: rate, time, AP by both criteria."""
    rows = []
    for norm, facts in numbers["norms"].items():
        row = {
            "norm": norm,
            "rate": None if facts["rate"] is None else f"{facts['rate']:g}",
            "ms per iteration": f"{1000 * facts['seconds_per_iteration']:.0f}",
        }
        for criterion in numbers["differences"]:
            scores = list(facts[criterion].values())
            row[f"{numbers['score']}, {criterion}"] = _mean_and_spread(scores)
        row["seeds"] = len(facts[ITERATIONS])
        rows.append(row)
    return Table.from_rows(rows)


def _mean_and_spread(scores: list[float]) -> str | None:
    if not scores:
        return None
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}"


def _mean_curves(plan: Plan, results: Results) -> list[Curve]:
    """Return AP over iterations, as means over the seeds, of each norm and length."""
    curves = []
    for number, norm in enumerate(plan.norms):
        for iterations in plan.lengths(norm):
            runs = [
                dict(result["curve"])
                for job, result in results.items()
                if (job.norm, job.iterations) == (norm, iterations)
                and not job.is_search
            ]

            points = []
            for place in sorted(set().union(*runs)):
                if all(place in run for run in runs):
                    mean = statistics.mean(run[place] for run in runs)
                    points.append((place, mean))
            is_longer = iterations > plan.iterations

            style = {"color": f"C{number}", "linestyle": "--" if is_longer else "-"}
            label = "" if is_longer else norm
            curves.append(Curve(points, label, style, plan.times[norm]))
    return curves


def _difference_table(
    criterion: str, norms: Iterable[str], differences: Mapping[str, Mapping[str, Any]]
) -> Table:
    """List the paired differences of all norms."""
    rows = []
    for norm in norms:
        row = {criterion: norm}
        for other in norms:
            values = differences.get(f"{norm} - {other}")
            row[f"- {other}"] = str(Difference(**values)) if values else ""
        rows.append(row)
    return Table.from_rows(rows)


def _rate_table(plan: Plan, results: Results) -> Table:
    """List the AP of the search."""
    ap = {job: result["AP"] for job, result in results.items() if job.is_search}
    lengths = sorted({job.iterations for job in ap})
    rows = []
    for norm in plan.norms:
        for length in lengths:
            row = {"norm": norm, "iterations": length}
            for rate in sorted(plan.rates):
                job = Job(norm, rate, SEARCH_SEED, length)
                row[f"{rate:g}"] = ap.get(job)
            rows.append(row)
    return Table.from_rows(rows)
