"""Print the AP of the arms of a results file, and their differences to some of them: parts 1b to 2d of PLAN.md.

python -m experiments.bn_weights.differences RESULTS.csv ARM ...
"""

import csv
import statistics
import sys
from collections import defaultdict

from gw_detectron.workbench.compare.plan import SEARCH_SEED
from gw_detectron.workbench.compare.verdict import paired_difference

#: photos -> arm -> detector -> AP
Scores = dict[str, dict[str, dict[str, float]]]


def read(file: str) -> Scores:
    """Return the scored APs; those of changed photos are averaged."""
    values = defaultdict(list)
    with open(file, newline="") as stream:
        for row in csv.DictReader(stream):
            detector = row.get("run") or row["seed"]
            photos = row.get("data", "unchanged")
            if row.get("change", "clean") != "clean":
                photos = "changed"
            if detector != str(SEARCH_SEED):
                values[photos, row["arm"], detector].append(float(row["AP"]))

    scores: Scores = defaultdict(lambda: defaultdict(dict))
    for (photos, arm, detector), aps in values.items():
        scores[photos][arm][detector] = statistics.mean(aps)
    return scores


def numbered(aps: dict[str, float]) -> dict[int, float]:
    """Return the APs by the place of the detector in the order of names."""
    return dict(enumerate(aps[name] for name in sorted(aps)))


def main(file: str, *references: str) -> None:
    for photos, arms in read(file).items():
        print("|", " | ".join((photos, "AP", *(f"- {name}" for name in references))))
        for arm, aps in arms.items():
            listed = ", ".join(f"{ap:.1f}" for ap in numbered(aps).values())
            cells = [f"{statistics.mean(aps.values()):.1f} ({listed})"]
            for other in references:
                gain = paired_difference(numbered(aps), numbered(arms[other]))
                cells.append("" if other == arm else str(gain))
            print("|", " | ".join((arm, *cells)))


if __name__ == "__main__":
    main(*sys.argv[1:])
