"""Compare finished runs: paired differences with intervals, and a recommendation."""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from .plan import SEARCH_SEED, Job, Plan

#: 97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
ITERATIONS, TIME = "equal iterations", "equal time"
_CLOSE = 1.0  # AP below the best norm's that a faster one may have

Scores = Mapping[int, float]  # AP by seed


class Difference(NamedTuple):
    """Mean difference over common seeds, with its 95 % interval, which needs two seeds."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.1f}, {self.high:+.1f}]"
        return f"{self.mean:+.1f}{interval}"


def paired_difference(first: Scores, second: Scores) -> Difference | None:
    """Compare values by seed, with the interval of the paired t test; None without a common seed."""
    pairs = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
    if not pairs:
        return None
    mean, count = statistics.mean(pairs), len(pairs)
    if count == 1:
        return Difference(mean, None, None, 1)
    half = _T[min(count - 2, len(_T) - 1)] * statistics.stdev(pairs) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, count)


def summarize(
    plan: Plan, times: Mapping[str, float], results: Mapping[Job, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the numbers of a comparison, which ``comparison.json`` holds."""
    ap = {
        job: results[job]["AP"]
        for job in sorted(results, key=lambda job: (plan.norms.index(job.norm), job.seed))
    }
    rates = {norm: plan.search(norm, ap)[1] for norm in plan.norms}
    tables: dict[str, dict[str, dict[int, float]]] = {}  # criterion -> norm -> seed -> AP
    for criterion, place in ((ITERATIONS, 0), *([(TIME, -1)] if plan.times else [])):
        table = tables[criterion] = {}
        for job, value in ap.items():
            if job.seed != SEARCH_SEED and job.iterations == plan.lengths(job.norm)[place]:
                table.setdefault(job.norm, {})[job.seed] = value
    norms = {
        norm: {
            "rate": rate,
            "rate_at_the_edge": len(plan.rates) > 1
            and rate in (min(plan.rates), max(plan.rates)),
            "seconds_per_iteration": times[norm],
            **{criterion: table.get(norm, {}) for criterion, table in tables.items()},
        }
        for norm, rate in rates.items()
    }
    differences = {
        criterion: {
            f"{first} - {second}": difference._asdict()
            for first, second in itertools.permutations(table, 2)
            if (difference := paired_difference(table[first], table[second]))
        }
        for criterion, table in tables.items()
    }
    take, text = advise(table, times, criterion)  # by equal time if there is one
    if edges := [norm for norm, each in norms.items() if each["rate_at_the_edge"]]:
        text += (
            f" The chosen rate of {', '.join(edges)} is at the edge of those tried: try more."
        )
    recommended = {"norm": take, "rate": rates[take]} if take else None
    numbers = {"iterations": plan.iterations, "norms": norms, "differences": differences}
    score = next((found["score"] for found in results.values() if found["AP"]), "AP")
    return {"advice": text, "recommended": recommended, "score": score, **numbers}


def advise(
    table: Mapping[str, Scores], times: Mapping[str, float], criterion: str
) -> tuple[str, str]:
    """Return the norm to take, and a sentence with the uncertainty; "" where the runs tell nothing.

    It is the fastest of those at most 1 AP below the best one, with a difference whose interval includes 0.
    The interval does not suffice: few seeds, or one that diverged, make it wide.
    """
    seeds = (
        set.intersection(*(set(scores) for scores in table.values()))
        if len(table) > 1
        else set()
    )
    if not seeds or not any(max(scores.values()) for scores in table.values()):
        return "", "Too few runs are finished to compare norms."
    means = {
        norm: statistics.mean(scores[seed] for seed in seeds) for norm, scores in table.items()
    }
    best, second = sorted(means, key=means.__getitem__, reverse=True)[:2]
    start = f"After {criterion}, {best} has the highest AP, {means[best]:.1f}"
    behind = {
        norm: paired_difference(table[best], scores)
        for norm, scores in table.items()
        if norm != best
    }
    equal = {norm: each for norm, each in behind.items() if each and (each.low or 0.0) <= 0}
    if len(seeds) == 1:
        advice = "one seed shows no order: give --seeds 3 or more time."
        return best, f"{start}, and {second} {means[second]:.1f}, but {advice}"
    if not equal:
        lead = f"{behind[second]} to the next, {second} (95 % interval, {len(seeds)} seeds)"
        return best, f"{start}: {lead}. Take {best}."
    take = min(
        [best, *(norm for norm, each in equal.items() if each.mean <= _CLOSE)],
        key=times.__getitem__,
    )
    others = ", ".join(f"{norm} ({each})" for norm, each in equal.items())
    lead = f"with {len(seeds)} seeds its lead over {others} is not certain (95 % intervals)"
    return (
        take,
        f"{start}; {lead}. Take {take}, the fastest of these within {_CLOSE:g} AP of the highest.",
    )
