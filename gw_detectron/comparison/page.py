"""The page of a comparison, from the files in its folder."""

import itertools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..atomic import atomic_write
from ..errors import MissingFileError
from ..report.page import write_page
from ..report.sections import Picture, Section, Table, make_axes
from .plan import SEARCH_SEED, Job, Plan
from .verdict import ITERATIONS, TIME, paired_difference, scored, summarize

SETTINGS, RESULTS, NUMBERS = "settings.json", "results.jsonl", "comparison.json"
PAGE = "comparison.html"

Results = Mapping[Job, Mapping[str, Any]]


def write_comparison(folder: Path) -> dict[str, Any]:
    """Write ``comparison.html`` and ``comparison.json`` of the finished runs in a folder of ``gw-detectron compare``.

    Returns:
        The content of ``comparison.json``.
    """
    if not (folder / SETTINGS).is_file() or not (folder / RESULTS).is_file():
        raise MissingFileError(f"'{folder}': no finished run of a comparison. Fix: give the --output of a comparison.")
    settings = json.loads((folder / SETTINGS).read_text())
    lines = map(json.loads, (folder / RESULTS).read_text().splitlines())
    results = {Job(*(line[name] for name in Job._fields)): line for line in lines}
    plan = Plan(*(settings[name] for name in ("norms", "rates", "iterations", "equal_time")))
    numbers = summarize(plan, settings["times"], results)
    sections = {
        "Advice": Section(text=numbers["advice"], tables=[_overview(plan, numbers)]),
        "Curves": _curves(plan, settings["times"], results),
        "Differences": _differences(plan, results),
        "Learning rates": _rates(plan, results),
        "AP per class": _classes(plan, results),
    }
    diverged = [f"{job.name}: {found['diverged']}" for job, found in results.items() if found["diverged"]]
    if diverged:
        sections["Diverged"] = Section(text="AP 0 each.", tables=[Table([], [(line,) for line in diverged])])
    write_page(folder / PAGE, f"Comparison {folder.resolve().name}", sections)
    with atomic_write(folder / NUMBERS) as temporary:
        temporary.write_text(json.dumps(numbers, indent=2) + "\n")
    return numbers


def _overview(plan: Plan, numbers: Mapping[str, Any]) -> Table:
    """List the norms: rate, time, AP by both criteria."""
    criteria = [name for name in (ITERATIONS, TIME) if name in numbers["differences"]]
    rows = []
    for norm, found in numbers["norms"].items():
        aps = [mean_and_deviation(list(found[criterion].values())) for criterion in criteria]
        rate = "-" if found["rate"] is None else f"{found['rate']:g}"
        rows.append([norm, rate, f"{1000 * found['seconds_per_iteration']:.0f}", *aps, len(found[ITERATIONS])])
    return Table(["norm", "rate", "ms per iteration", *(f"AP, {name}" for name in criteria), "seeds"], rows)


def mean_and_deviation(values: list[float]) -> str:
    """Return "mean ± standard deviation" of AP."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _curves(plan: Plan, times: Mapping[str, float], results: Results) -> Section:
    """Plot AP over iterations and over time, and the loss, as means over seeds."""
    pictures = []
    for x_label, key in (("iteration", "curve"), ("seconds of training", "curve"), ("iteration", "losses")):
        figure, axes = make_axes(5.5, 3.8, xlabel=x_label, ylabel="AP" if key == "curve" else "training loss")
        for number, norm in enumerate(plan.norms):
            unit = 1.0 if x_label == "iteration" else times[norm]
            for iterations in plan.lengths(norm):
                shown = (norm, iterations)
                runs = [
                    found[key] for job, found in results.items() if (job.norm, job.iterations) == shown and job.seed
                ]
                points: dict[int, list[float]] = {}
                for place, value in itertools.chain.from_iterable(runs):
                    points.setdefault(place, []).append(value)
                means = {place: statistics.mean(all_) for place, all_ in points.items() if len(all_) == len(runs)}
                line = axes.plot(
                    [unit * place for place in means], list(means.values()), ".-", color=f"C{number % 10}"
                )[0]
                if iterations == plan.iterations:
                    line.set_label(norm)
                else:
                    line.set_linestyle("--")
        axes.legend(fontsize="small")
        pictures.append(Picture.from_figure(f"{key}_{x_label.split()[0]}", figure))
    text = "Means over the seeds. A dashed line is the longer training of a faster norm, for equal time."
    return Section(text=text, pictures=[pictures])


def _differences(plan: Plan, results: Results) -> Section:
    """List the paired differences of all norms."""
    tables = []
    for criterion in (ITERATIONS, *([TIME] if plan.equal_time else [])):
        found = scored(plan, results, criterion)
        rows = [
            [
                norm,
                *("" if other == norm else str(paired_difference(found[norm], found[other]) or "-") for other in found),
            ]
            for norm in found
        ]
        tables.append(Table([criterion, *(f"- {other}" for other in found)], rows))
    text = "AP of the row minus AP of the column, mean over common seeds, with the 95 % interval of the paired t test."
    return Section(text=f"{text} It contains the variation between seeds, not that of the images.", tables=tables)


def _rates(plan: Plan, results: Results) -> Section:
    """Plot and list the AP of the search."""
    figure, axes = make_axes(5.5, 3.8, xlabel="learning rate", ylabel="AP", xscale="log")
    rows = []
    for number, norm in enumerate(plan.norms):
        runs = sorted(job for job in results if job.norm == norm and job.seed == SEARCH_SEED)
        for iterations in sorted({job.iterations for job in runs}):
            found = {job.rate: results[job]["AP"] for job in runs if job.iterations == iterations}
            rows.append([norm, iterations, *(found.get(rate) for rate in sorted(plan.rates))])
            first = iterations == runs[0].iterations
            axes.plot(
                *zip(*found.items(), strict=True),
                "o-" if first else "s--",
                color=f"C{number % 10}",
                markersize=4,
                label=norm if first else "",
            )
    axes.legend(fontsize="small")
    header = ["norm", "iterations", *(f"{rate:g}" for rate in sorted(plan.rates))]
    text = "Seed 0. The better half of the rates goes on to runs of twice the length (dashed)."
    return Section(text=text, pictures=[[Picture.from_figure("rates", figure)]], tables=[Table(header, rows)])


def _classes(plan: Plan, results: Results) -> Section:
    """List the AP of each class for the runs of equal iterations."""
    found: dict[str, dict[str, list[float]]] = {}
    for job, result in results.items():
        if job.seed != SEARCH_SEED and job.iterations == plan.iterations:
            for name, value in result["scores"].get(result["task"], {}).items():
                if value is not None:  # None: no such object
                    found.setdefault(name, {}).setdefault(job.norm, []).append(value)
    norms = [norm for norm in plan.norms if any(norm in values for values in found.values())]
    rows = [
        [name.removeprefix("AP-"), *(mean_and_deviation(values.get(norm, [])) for norm in norms)]
        for name, values in found.items()
    ]
    return Section(text=f"After {plan.iterations} iterations, all seeds.", tables=[Table(["", *norms], rows)])
