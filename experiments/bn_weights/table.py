"""Print the tables and decisions of part 1 of PLAN.md.

python -m experiments.bn_weights.table RESULTS.csv ...
"""

import csv
import statistics
import sys
from collections import defaultdict
from typing import Any

from gw_detectron.workbench.compare.verdict import Difference, paired_difference

from .without_training import ARMS, CHANGES

CLEAN = "clean"
CHANGED = "all changes"
_SAFE = -1.0  # AP on clean photos that a safe arm may lose
_WHITENING = ("MixGW 0.1", "MixGW 0.3")

#: photos -> arm -> run -> AP
Scores = dict[str, dict[str, dict[str, float]]]


def rows_of(*files: str) -> list[dict[str, Any]]:
    """Return the rows of files, with numbers for strength and AP."""
    rows = []
    for file in files:
        with open(file, newline="") as stream:
            for row in csv.DictReader(stream):
                ap = float(row["AP"] or 0)  # no detection: 0
                rows.append({**row, "strength": float(row["strength"]), "AP": ap})
    return rows


def read(*files: str) -> Scores:
    """Average the strengths of each change, and all changed photos."""
    values = defaultdict(list)
    for row in rows_of(*files):
        change, arm, run = row["change"], row["arm"], row["run"]
        values[change, arm, run].append(row["AP"])
        if change != CLEAN:
            values[CHANGED, arm, run].append(row["AP"])

    scores: Scores = defaultdict(lambda: defaultdict(dict))
    for (change, arm, run), aps in values.items():
        scores[change][arm][run] = statistics.mean(aps)
    return scores


def difference(scores: Scores, photos: str, first: str, second: str) -> Difference:
    """Compare two arms on the same detectors."""
    arms = scores[photos]
    runs = sorted(arms[first])
    found = paired_difference(
        {number: arms[first][run] for number, run in enumerate(runs)},
        {number: arms[second][run] for number, run in enumerate(runs)},
    )
    assert found is not None, "no common detector"
    return found


def decisions(scores: Scores) -> list[str]:
    """Apply the rules of the plan."""
    safe = [
        arm
        for arm in ARMS
        if arm != "BN" and difference(scores, CLEAN, arm, "BN").mean >= _SAFE
    ]
    lines = [f"safe: {', '.join(safe) or 'none'}"]
    better = [
        arm for arm in safe if not difference(scores, CHANGED, arm, "BN").may_be_none
    ]
    if not better:
        return [*lines, "--mix is not advised"]

    def ap(arm: str) -> float:
        return statistics.mean(scores[CHANGED][arm].values())

    best = max(safe, key=ap)
    lines.append(f"--mix is advised; its default is {best}")
    whitening = [arm for arm in safe if arm in _WHITENING]
    others = [arm for arm in safe if arm not in _WHITENING]
    if whitening and others:
        first, second = max(whitening, key=ap), max(others, key=ap)
        gain = difference(scores, CHANGED, first, second)
        verb = "is not" if gain.may_be_none else "is"
        lines.append(f"whitening {verb} advised: {first} - {second}: {gain}")
    return lines


def main(*files: str) -> None:
    scores = read(*files)
    photos = [*CHANGES, CHANGED]
    print("| arm |", " | ".join(photos), "| clean - BN | changed - BN |")
    print("|", " --- |" * (len(photos) + 3))
    for arm in ARMS:
        cells = [
            f"{statistics.mean(scores[name][arm].values()):.1f}" for name in photos
        ]
        for name in (CLEAN, CHANGED):
            cells.append(
                "" if arm == "BN" else str(difference(scores, name, arm, "BN"))
            )
        print(f"| {arm} |", " | ".join(cells), "|")

    for kind in ("GN", "none"):
        rows = {
            arm: [
                ap for run, ap in scores[CHANGED][arm].items() if run.startswith(kind)
            ]
            for arm in ARMS
        }
        listed = [
            f"{arm} {statistics.mean(aps):.1f}" for arm, aps in rows.items() if aps
        ]
        print(f"{kind} in FPN and heads, all changes: {', '.join(listed)}")
    print("\n".join(decisions(scores)))


if __name__ == "__main__":
    main(*sys.argv[1:])
