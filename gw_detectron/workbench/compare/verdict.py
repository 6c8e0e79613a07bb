"""Compare finished runs: paired differences with intervals, and a recommendation."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
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

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Difference":
        """Return the mean of differences, one per seed, by the paired t test."""
        seeds = len(differences)
        mean = statistics.mean(differences)
        if seeds == 1:
            return cls(mean, None, None, seeds)

        quantile = _T[min(seeds - 1, len(_T)) - 1]
        deviation = statistics.stdev(differences)
        half = quantile * deviation / math.sqrt(seeds)
        return cls(mean, mean - half, mean + half, seeds)

    @property
    def may_be_none(self) -> bool:
        """Whether the interval includes 0 or less."""
        return self.low is None or self.low <= 0

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:+.1f}, {self.high:+.1f}]"
        return f"{self.mean:+.1f}{interval}"


def paired_difference(first: Scores, second: Scores) -> Difference | None:
    """Compare values by seed; None without a common seed."""
    seeds = first.keys() & second.keys()
    if not seeds:
        return None
    return Difference.of([first[seed] - second[seed] for seed in seeds])


def summarize(plan: Plan, results: Results) -> dict[str, Any]:
    """Return the numbers of a comparison, which ``comparison.json`` holds."""
    ap = {job: result["AP"] for job, result in results.items()}
    criterion = ITERATIONS
    tables = {ITERATIONS: _scores(plan, ap, 0)}
    if plan.equal_time:
        criterion = TIME
        tables[TIME] = _scores(plan, ap, -1)

    norms = {norm: _facts(plan, norm, ap) for norm in plan.norms}
    for name, table in tables.items():
        for norm, facts in norms.items():
            facts[name] = table.get(norm, {})

    take, advice = advise(tables[criterion], plan.times, criterion)
    edges = [norm for norm, facts in norms.items() if facts["rate_at_the_edge"]]
    if edges:
        names = ", ".join(edges)
        advice += (
            f" The chosen rate of {names} is at the edge of those tried: try more."
        )
    recommended = {"norm": take, "rate": norms[take]["rate"]} if take else None
    scored = [result["score"] for result in results.values() if result["AP"]]
    return {
        "advice": advice,
        "recommended": recommended,
        "score": scored[0] if scored else "AP",
        "iterations": plan.iterations,
        "norms": norms,
        "differences": {name: _differences(table) for name, table in tables.items()},
    }


def _facts(plan: Plan, norm: str, ap: Mapping[Job, float]) -> dict[str, Any]:
    """Return the rate and the time of a norm."""
    rate = plan.search(norm, ap)[1]
    edges = (min(plan.rates), max(plan.rates))
    return {
        "rate": rate,
        "rate_at_the_edge": len(plan.rates) > 1 and rate in edges,
        "seconds_per_iteration": plan.times[norm],
    }


def _scores(
    plan: Plan, ap: Mapping[Job, float], place: int
) -> dict[str, dict[int, float]]:
    """Return norm -> seed -> AP of the scored runs of a length.

    ``place`` is that in :meth:`Plan.lengths`.
    """
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
    seeds = _common_seeds(table)
    found_any = any(any(scores.values()) for scores in table.values())
    if not seeds or not found_any:
        return "", "Too few runs are finished to compare norms."

    means = {}
    for norm, scores in table.items():
        means[norm] = statistics.mean(scores[seed] for seed in seeds)
    best, second = sorted(means, key=means.__getitem__, reverse=True)[:2]
    start = f"After {criterion}, {best} has the highest AP, {means[best]:.1f}"
    if len(seeds) == 1:
        text = f"{start}, and {second} {means[second]:.1f}, but one seed shows no order"
        return best, f"{text}: give --seeds 3 or more time."

    leads = {}
    for norm, scores in table.items():
        if norm != best:
            differences = [table[best][seed] - scores[seed] for seed in seeds]
            leads[norm] = Difference.of(differences)
    uncertain = {norm: lead for norm, lead in leads.items() if lead.may_be_none}
    if not uncertain:
        text = f"{start}: {leads[second]} to the next, {second}"
        text += f" (95 % interval, {len(seeds)} seeds). Take {best}."
        return best, text

    take = _fastest_close(best, uncertain, times)
    others = ", ".join(f"{norm} ({lead})" for norm, lead in uncertain.items())
    text = (
        f"{start}; with {len(seeds)} seeds its lead over {others} is not certain (95 % intervals). "
        f"Take {take}, the fastest of these within {_CLOSE:g} AP of the highest."
    )
    return take, text


def _common_seeds(table: Mapping[str, Scores]) -> set[int]:
    """Return the seeds that all norms have; none for a single norm."""
    by_norm = [set(scores) for scores in table.values()]
    return set.intersection(*by_norm) if len(by_norm) > 1 else set()


def _fastest_close(
    best: str, leads: Mapping[str, Difference], times: Mapping[str, float]
) -> str:
    """Return the fastest of the best norm and those that are at most 1 AP behind."""
    close = [norm for norm, lead in leads.items() if lead.mean <= _CLOSE]
    return min([best, *close], key=times.__getitem__)
