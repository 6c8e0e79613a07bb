"""Print the tables and decisions of PLAN.md: python -m experiments.scale.table RESULTS.csv"""

import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping

from gw_detectron.workbench.compare.verdict import Difference, paired_difference

from .train import ARMS

#: arm -> seed -> AP
Scores = Mapping[str, Mapping[int, float]]


def read(file: str) -> dict[str, Scores]:
    """Return the scores of each set of images, and of its repetition by a later version."""
    scores: dict = defaultdict(lambda: defaultdict(dict))
    with open(file, newline="") as stream:
        for row in csv.DictReader(stream):
            scores[row["data"]][row["arm"]][int(row["seed"])] = float(row["AP"])
    return scores


def pooled(first: Scores, second: Scores) -> Scores:
    """Join the runs of two versions that have the same seeds; runs of one version and seed stay a pair."""
    return {
        arm: {**first[arm], **{-seed: ap for seed, ap in second[arm].items()}}
        for arm in first.keys() & second.keys()
    }


def combined(scores: Scores, *pairs: tuple[str, str]) -> Difference | None:
    """Compare arms by seed; of several pairs, the mean of their differences."""
    first: dict[int, float] = {}
    arms = [scores.get(arm, {}) for pair in pairs for arm in pair]
    for seed in set.intersection(*map(set, arms)):
        gains = [scores[one][seed] - scores[other][seed] for one, other in pairs]
        first[seed] = statistics.mean(gains)
    return paired_difference(first, dict.fromkeys(first, 0.0))


#: question -> arms, the first minus the second
QUESTIONS = {
    "H3: GN k=0.21 - GN": (("GN k=0.21", "GN"),),
    "BN k=0.21 - BN": (("BN k=0.21", "BN"),),
    "GN+WS k=0.21 - GN+WS": (("GN+WS k=0.21", "GN+WS"),),
    "H4: GW:iters=2 - GN, mean of both scales": (
        ("GW2", "GN k=0.21"),
        ("GW2 variance 1", "GN"),
    ),
    "GW:iters=2 - GN, small": (("GW2", "GN k=0.21"),),
    "GW:iters=2 - GN, variance 1": (("GW2 variance 1", "GN"),),
    "GW - GN, mean of both scales": (
        ("GW x0.39", "GN k=0.21"),
        ("GW variance 1", "GN"),
    ),
    "GW - GN, small": (("GW x0.39", "GN k=0.21"),),
    "GW - GN, variance 1": (("GW variance 1", "GN"),),
    # added after the runs, as the one number of the two that follow
    "GW:iters=2 - GW, mean of both scales": (
        ("GW2", "GW x0.39"),
        ("GW2 variance 1", "GW variance 1"),
    ),
    "GW:iters=2 - GW, small": (("GW2", "GW x0.39"),),
    "GW:iters=2 - GW, variance 1": (("GW2 variance 1", "GW variance 1"),),
    "GW:iters=2: variance 1 - as it is": (("GW2 variance 1", "GW2"),),
    "GW: variance 1 - as it is": (("GW variance 1", "GW"),),
    "GW: small - as it is": (("GW x0.39", "GW"),),
    "GN: fast shifts - as they are": (("GN fast shifts", "GN"),),
    "GN k=0.21: slow shifts - as they are": (("GN k=0.21 slow shifts", "GN k=0.21"),),
    "both as they are: GW:iters=2 - GN": (("GW2", "GN"),),
}


def main(file: str) -> None:
    sets = read(file)
    if "bccd, repeated" in sets:
        sets["bccd, both"] = pooled(sets["bccd"], sets["bccd, repeated"])
    for data, scores in sets.items():
        print(f"\n{data}\n\n| arm | AP | seeds |\n| --- | --- | --- |")
        for arm in ARMS:
            values = scores.get(arm, {})
            if values:
                mean = statistics.mean(values.values())
                spread = statistics.stdev(values.values()) if len(values) > 1 else 0.0
                listed = ", ".join(f"{values[seed]:.1f}" for seed in sorted(values))
                print(f"| {arm} | {mean:.1f} ± {spread:.1f} | {listed} |")

        print("\n| question | difference |\n| --- | --- |")
        for question, pairs in QUESTIONS.items():
            print(f"| {question} | {combined(scores, *pairs) or '-'} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
