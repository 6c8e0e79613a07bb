"""A run against an earlier one, by its ratios: a machine that is slower as a whole makes no difference.

Chance moves the ratio of two times of one size far more than the mean over all sizes, which is therefore held tighter.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import geometric_mean
from typing import NamedTuple

from tabulate import tabulate

from .table import Table

TOLERANCE = 0.2
#: how many times the tolerance a ratio of times of one size may grow, if there are others: to about the double
SINGLE = 5
#: how much larger a ratio of bytes may be: they are counted, and no chance is in them
BYTES = 0.02


class Change(NamedTuple):
    """One ratio in both runs; ``allowed`` is how much larger than before it may be, as a part of it."""

    key: tuple[str, ...]  # of the row, and the name of the ratio
    before: float
    now: float
    allowed: float

    @property
    def growth(self) -> float:
        return self.now / self.before - 1

    @property
    def worse(self) -> bool:
        return self.growth > self.allowed


@dataclass(frozen=True)
class Comparison:
    """What became of the ratios.

    Args:
        rows: the ratios and their geometric means.
        headings: of the key of ``rows``.
        remarks: what makes the two runs less comparable.
        tolerance: how much larger than before a mean may be, as a part of it.
    """

    rows: tuple[Change, ...]
    headings: tuple[str, ...]
    remarks: tuple[str, ...]
    tolerance: float

    @property
    def worse(self) -> tuple[Change, ...]:
        """The ratios that have grown by more than they may."""
        return tuple(row for row in self.rows if row.worse)

    def __str__(self) -> str:
        shown = [
            (*row.key, f"{row.before:.3g}", f"{row.now:.3g}", f"{row.growth:+.1%}", "WORSE" * row.worse)
            for row in self.rows
        ]
        headings = (*self.headings, "before", "now", "change", "")
        lines = [tabulate(shown, headers=headings, disable_numparse=True), *self.remarks]
        lines.append(
            f"{len(self.worse)} of {len(self.rows)} ratios are worse than before by more than {self.tolerance:.0%}, "
            f"times of one size among several by more than {SINGLE * self.tolerance:.0%}, bytes by more than "
            f"{min(BYTES, self.tolerance):.0%}."
        )
        return "\n".join(lines)


def compare(table: Table, reference: Table, tolerance: float = TOLERANCE) -> Comparison:
    """Compares the ratios of this package's rows with those of an earlier run.

    Ratios that only one of the runs has are not compared; a remark counts them.

    Args:
        table: the run of now.
        reference: the earlier one.
        tolerance: how much larger than before a geometric mean of ratios of times, or one that stands alone, may be, as
            a part of it; that of one size among several may grow :data:`SINGLE` times as much. Ratios of bytes may
            grow by :data:`BYTES`, or by the tolerance if that is less.

    Raises:
        ValueError: the runs are of different benchmarks, devices or settings, or have no ratio in common; or the
            tolerance is negative or not finite.
    """
    if not 0 <= tolerance < math.inf:  # neither is nan
        raise ValueError(f"tolerance {tolerance}: give a finite number, 0 or more; 0.2 for 20 %")
    _check_alike(table, reference)
    before, now = _ratios(reference), _ratios(table)
    shared = [key for key in now if key in before]
    if not shared:
        raise ValueError(
            f"the reference and this run have no ratio in common: the reference has {_example(before)}, this run "
            f"{_example(now)}; measure the same {table.columns.key[0]}s and dtypes, with what they are divided by"
        )
    remarks = [
        f"Another {name} than before: {table.header.get(name)}, before {reference.header.get(name)}."
        for name in ("machine", "threads", "torch", "GW_DETECTRON_KERNELS")
        if table.header.get(name) != reference.header.get(name)
    ]
    for which, alone in (("earlier", before.keys() - now.keys()), ("present", now.keys() - before.keys())):
        if alone:
            remarks.append(f"{len(alone)} ratios are in the {which} run only and are not compared.")
    sizes = defaultdict(list)  # the key without the shape of a layer or the name of a model
    for key in shared:
        sizes[key[1:]].append(key)
    rows = []
    for key in shared:
        of_one_size = SINGLE * tolerance if len(sizes[key[1:]]) > 1 else tolerance
        rows.append(Change(key, before[key], now[key], min(BYTES, tolerance) if _of_bytes(key) else of_one_size))
    for rest, keys in sizes.items():
        if len(keys) > 1 and not _of_bytes(rest):  # each of those is held by itself
            mean_before, mean_now = (geometric_mean(run[key] for key in keys) for run in (before, now))
            rows.append(Change((f"mean of {len(keys)}", *rest), mean_before, mean_now, tolerance))
    return Comparison(tuple(rows), (*table.columns.key, "ratio"), tuple(remarks), tolerance)


def _check_alike(table: Table, reference: Table) -> None:
    if table.kind != reference.kind:
        raise ValueError(
            f"the reference is a table of the benchmark {reference.kind!r}, this run is one of {table.kind!r}"
        )
    for name in ("device", "settings"):
        before, now = reference.header.get(name), table.header.get(name)
        if before != now:
            raise ValueError(
                f"the reference was measured with {name} {before}, this run is with {now}: their ratios cannot be "
                "compared. Name a reference of the same kind, or measure one"
            )


def _ratios(table: Table) -> dict[tuple[str, ...], float]:
    """The ratios to hold, by the key of their row and their name."""
    columns = table.columns
    return {
        (*(str(row[column]) for column in columns.key), name): float(ratio)
        for row in table.rows
        if columns.is_ours(row)
        for name in columns.watched
        if (ratio := row.get(name))
    }


def _of_bytes(key: tuple[str, ...]) -> bool:
    return key[-1].startswith("saved_")


def _example(ratios: dict[tuple[str, ...], float]) -> str:
    return next((f"{' '.join(key)} and {len(ratios) - 1} more" for key in ratios), "none")
