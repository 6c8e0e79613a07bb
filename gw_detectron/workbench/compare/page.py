"""The page of a comparison."""

import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report.page import write_page
from ..report.sections import Picture, Section, Table, make_axes
from .job import write_json
from .plan import SEARCH_SEED, Job, Plan
from .verdict import ITERATIONS, Difference, summarize

PAGE, NUMBERS = "comparison.html", "comparison.json"

Results = Mapping[Job, Mapping[str, Any]]


def write_comparison(
    folder: Path, plan: Plan, times: Mapping[str, float], results: Results
) -> dict[str, Any]:
    """Write ``comparison.html`` and ``comparison.json`` of finished runs; return the content of the latter."""
    numbers = summarize(plan, times, results)
    sections = {
        "Advice": Section(text=numbers["advice"], tables=[_overview(numbers)]),
        "Curves": _curves(plan, times, results),
        "Differences": _differences(numbers["differences"]),
    }
    if len(plan.rates) > 1:
        sections["Learning rates"] = _rates(plan, results)
    diverged = [
        (f"{job.name}: {found['diverged']}",)
        for job, found in results.items()
        if found["diverged"]
    ]
    if diverged:
        sections["Diverged"] = Section(text="AP 0 each.", tables=[Table([], diverged)])
    write_page(folder / PAGE, f"Comparison {folder.resolve().name}", sections)
    write_json(folder / NUMBERS, numbers)
    return numbers


def _overview(numbers: Mapping[str, Any]) -> Table:
    """List the norms: rate, time, AP by both criteria."""
    rows = []
    for norm, found in numbers["norms"].items():
        rate = "-" if found["rate"] is None else f"{found['rate']:g}"
        aps = []
        for values in (list(found[criterion].values()) for criterion in numbers["differences"]):
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            aps.append(f"{statistics.mean(values):.1f}{spread}" if values else "-")
        rows.append(
            [
                norm,
                rate,
                f"{1000 * found['seconds_per_iteration']:.0f}",
                *aps,
                len(found[ITERATIONS]),
            ]
        )
    criteria = [f"{numbers['score']}, {name}" for name in numbers["differences"]]
    return Table(["norm", "rate", "ms per iteration", *criteria, "seeds"], rows)


def _curves(plan: Plan, times: Mapping[str, float], results: Results) -> Section:
    """Plot AP over iterations and over time, as means over seeds."""
    pictures, scored = (
        [],
        {job: run["curve"] for job, run in results.items() if job.seed != SEARCH_SEED},
    )
    for x_label in ("iteration", "seconds of training"):
        figure, axes = make_axes(5.5, 3.8, xlabel=x_label, ylabel="AP")
        for number, norm in enumerate(plan.norms):
            unit = 1.0 if x_label == "iteration" else times[norm]
            for iterations in plan.lengths(norm):
                runs = [
                    curve
                    for job, curve in scored.items()
                    if (job.norm, job.iterations) == (norm, iterations)
                ]
                points: dict[int, list[float]] = {}
                for place, value in itertools.chain.from_iterable(runs):
                    points.setdefault(place, []).append(value)
                means = [
                    (unit * place, statistics.mean(ap))
                    for place, ap in points.items()
                    if len(ap) == len(runs)
                ]
                style, label = (".-", norm) if iterations == plan.iterations else (".--", "")
                axes.plot(
                    [x for x, _ in means],
                    [ap for _, ap in means],
                    style,
                    color=f"C{number % 10}",
                    label=label,
                )
        axes.legend(fontsize="small")
        pictures.append(Picture.from_figure(f"curve_{x_label.split()[0]}", figure))
    text = "Means over the seeds. A dashed line is the longer training of a faster norm, for equal time."
    return Section(text=text, pictures=[pictures])


def _differences(differences: Mapping[str, Mapping[str, Any]]) -> Section:
    """List the paired differences of all norms."""
    tables = []
    for criterion, found in differences.items():
        norms = list(dict.fromkeys(pair.split(" - ")[0] for pair in found))
        cells = {pair: str(Difference(**values)) for pair, values in found.items()}
        rows = [
            [norm, *(cells.get(f"{norm} - {other}", "") for other in norms)] for norm in norms
        ]
        tables.append(Table([criterion, *(f"- {other}" for other in norms)], rows))
    text = "AP of the row minus AP of the column, mean over common seeds, with the 95 % interval of the paired t test."
    return Section(
        text=f"{text} It contains the variation between seeds, not between images.",
        tables=tables,
    )


def _rates(plan: Plan, results: Results) -> Section:
    """List the AP of the search."""
    rates, found = (
        sorted(plan.rates),
        {job: run["AP"] for job, run in results.items() if job.seed == SEARCH_SEED},
    )
    rows = [
        [norm, length, *(found.get(Job(norm, rate, SEARCH_SEED, length)) for rate in rates)]
        for norm in plan.norms
        for length in sorted({job.iterations for job in found if job.norm == norm})
    ]
    text = "AP with seed 0. The better half of the rates goes on to runs of twice the length."
    return Section(
        text=text,
        tables=[Table(["norm", "iterations", *(f"{rate:g}" for rate in rates)], rows)],
    )
