"""Compare finished runs: paired differences with intervals, and a recommendation."""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from .plan import Job, Plan

#: 97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
ITERATIONS = "equal iterations"
TIME = "equal time"
_CLOSE = 1.0  # AP below the best norm's that a faster one may have

Scores = Mapping[int, float]  # AP by seed
Results = Mapping[Job, Mapping[str, Any]]


class Difference(NamedTuple):
    """Mean difference over common seeds, with its 95 % interval, which needs two seeds."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def may_be_none(self) -> bool:
        """Whether the interval includes 0 or less."""
        return self.low is None or self.low <= 0

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.1f}, {self.high:+.1f}]"
        return f"{self.mean:+.1f}{interval}"


def paired_difference(first: Scores, second: Scores) -> Difference | None:
    """Compare values by seed, with the interval of the paired t test; None without a common seed."""
    differences = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
    count = len(differences)
    if count == 0:
        return None

    mean = statistics.mean(differences)
    if count == 1:
        return Difference(mean, None, None, 1)
    quantile = _T[min(count - 2, len(_T) - 1)]
    half = quantile * statistics.stdev(differences) / math.sqrt(count)
    return Difference(mean, mean - half, mean + half, count)


def summarize(plan: Plan, times: Mapping[str, float], results: Results) -> dict[str, Any]:
    """Return the numbers of a comparison, which ``comparison.json`` holds."""
    ap = {job: result["AP"] for job, result in results.items()}
    tables = {ITERATIONS: _scores(plan, ap, 0)}
    if plan.times:
        tables[TIME] = _scores(plan, ap, -1)

    norms: dict[str, dict[str, Any]] = {}
    at_the_edge = []
    for norm in plan.norms:
        rate = plan.search(norm, ap)[1]
        is_edge = len(plan.rates) > 1 and rate in (min(plan.rates), max(plan.rates))
        if is_edge:
            at_the_edge.append(norm)
        norms[norm] = {
            "rate": rate,
            "rate_at_the_edge": is_edge,
            "seconds_per_iteration": times[norm],
        }
        for criterion, table in tables.items():
            norms[norm][criterion] = table.get(norm, {})

    criterion, table = list(tables.items())[-1]  # by equal time if there is one
    take, advice = advise(table, times, criterion)
    if at_the_edge:
        names = ", ".join(at_the_edge)
        advice += f" The chosen rate of {names} is at the edge of those tried: try more."
    scored = [result["score"] for result in results.values() if result["AP"]]
    return {
        "advice": advice,
        "recommended": {"norm": take, "rate": norms[take]["rate"]} if take else None,
        "score": scored[0] if scored else "AP",
        "iterations": plan.iterations,
        "norms": norms,
        "differences": {name: _differences(table) for name, table in tables.items()},
    }


def _scores(plan: Plan, ap: Mapping[Job, float], place: int) -> dict[str, dict[int, float]]:
    """Return norm -> seed -> AP of the scored runs of a length, by its place in :meth:`Plan.lengths`."""
    table = {}
    for norm in plan.norms:
        length = plan.lengths(norm)[place]
        scored = {
            job.seed: ap[job]
            for job in ap
            if job.norm == norm and job.iterations == length and not job.is_search
        }
        if scored:
            table[norm] = dict(sorted(scored.items()))
    return table


def _differences(table: Mapping[str, Scores]) -> dict[str, dict[str, Any]]:
    """Return the paired differences of all norms of a table."""
    differences = {}
    for first, second in itertools.permutations(table, 2):
        difference = paired_difference(table[first], table[second])
        if difference:
            differences[f"{first} - {second}"] = difference._asdict()
    return differences


def advise(
    table: Mapping[str, Scores], times: Mapping[str, float], criterion: str
) -> tuple[str, str]:
    """Return the norm to take, and a sentence with the uncertainty; "" where the runs tell nothing.

    It is the fastest of those at most 1 AP below the best one, with a difference whose interval
    includes 0. The interval does not suffice: few seeds, or one that diverged, make it wide.
    """
    by_norm = [set(scores) for scores in table.values()]
    seeds = set.intersection(*by_norm) if len(by_norm) > 1 else set()
    found_any = any(any(scores.values()) for scores in table.values())
    if not seeds or not found_any:
        return "", "Too few runs are finished to compare norms."

    means = {
        norm: statistics.mean(scores[seed] for seed in seeds) for norm, scores in table.items()
    }
    best, second = sorted(means, key=means.__getitem__, reverse=True)[:2]
    start = f"After {criterion}, {best} has the highest AP, {means[best]:.1f}"
    if len(seeds) == 1:
        text = f"{start}, and {second} {means[second]:.1f}, but one seed shows no order"
        return best, f"{text}: give --seeds 3 or more time."

    behind = {norm: paired_difference(table[best], table[norm]) for norm in table}
    equal = {
        norm: lead
        for norm, lead in behind.items()
        if norm != best and lead and lead.may_be_none
    }
    if not equal:
        next_one = f"{behind[second]} to the next, {second}"
        text = f"{start}: {next_one} (95 % interval, {len(seeds)} seeds). Take {best}."
        return best, text

    close = [norm for norm, lead in equal.items() if lead.mean <= _CLOSE]
    take = min([best, *close], key=times.__getitem__)
    others = ", ".join(f"{norm} ({lead})" for norm, lead in equal.items())
    text = (
        f"{start}; with {len(seeds)} seeds its lead over {others} is not certain (95 % intervals). "
        f"Take {take}, the fastest of these within {_CLOSE:g} AP of the highest."
    )
    return take, text
