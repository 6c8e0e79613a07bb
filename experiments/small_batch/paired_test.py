"""Paired comparisons of norms, as planned in experiments/small_batch/study.md."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats

#: hypothesis -> the two norms whose difference it is about
HYPOTHESES = {
    "H1": ("GW", "BN"),
    "H2": ("GW", "GN"),
    "H3": ("BN+GW", "BN+GN"),
    "H4": ("BN+GW", "BN"),
}
LEAST_DIFFERENCE = 1.0  # AP
_LEVEL = 0.05


class Difference(NamedTuple):
    """Mean difference of paired values, with its 95 % interval and the p-value of the two-sided paired t-test."""

    mean: float
    low: float
    high: float
    p: float


def paired_difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Compare values by seed; None with fewer than two common seeds."""
    pairs = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    if len(pairs) < 2:
        return None
    mean = statistics.mean(pairs)
    if len(set(pairs)) == 1:  # no variation: the t distribution has no scale
        return Difference(mean, mean, mean, float(mean == 0))
    test = stats.ttest_1samp(pairs, 0.0)
    low, high = test.confidence_interval(1 - _LEVEL)
    return Difference(mean, float(low), float(high), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's method (Scandinavian Journal of Statistics 6, 1979)."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def verdict(difference: Difference, corrected_p: float) -> str:
    """Return "holds", "no" or "open", by the rules of the plan."""
    significant = corrected_p < _LEVEL
    if significant and difference.mean >= LEAST_DIFFERENCE:
        return "holds"
    if (significant and difference.mean < 0) or difference.high < LEAST_DIFFERENCE:
        return "no"
    return "open"
