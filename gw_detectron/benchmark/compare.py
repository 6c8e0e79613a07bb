"""A run against an earlier one, by its ratios: a machine that is slower as a whole makes no difference."""

import math
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from .table import Table

TOLERANCE = 0.15


@dataclass(frozen=True)
class Comparison:
    """What became of the ratios.

    Args:
        rows: key of the row, name of the ratio, its value before and now, and now divided by before.
        headings: of the columns of ``rows``.
        remarks: what makes the two runs less comparable.
        tolerance: how much larger than before a ratio may be, as a part of it.
    """

    rows: tuple[tuple[Any, ...], ...]
    headings: tuple[str, ...]
    remarks: tuple[str, ...]
    tolerance: float

    @property
    def worse(self) -> tuple[tuple[Any, ...], ...]:
        """The rows whose ratio has grown by more than the tolerance."""
        return tuple(row for row in self.rows if row[-1] > 1 + self.tolerance)

    def __str__(self) -> str:
        shown = [
            (*row[:-3], *(f"{value:.3g}" for value in row[-3:-1]), f"{row[-1] - 1:+.1%}", "WORSE" * (row in self.worse))
            for row in self.rows
        ]
        lines = [tabulate(shown, headers=[*self.headings, ""], disable_numparse=True), *self.remarks]
        lines.append(
            f"{len(self.worse)} of {len(self.rows)} ratios are worse than before by more than {self.tolerance:.0%}."
        )
        return "\n".join(lines)


def compare(table: Table, reference: Table, tolerance: float = TOLERANCE) -> Comparison:
    """Compares the ratios of this package's rows with those of an earlier run.

    Ratios that only one of the runs has are not compared; a remark counts them.

    Args:
        table: the run of now.
        reference: the earlier one.
        tolerance: how much larger than before a ratio may be, as a part of it.

    Raises:
        ValueError: the runs are of different benchmarks, devices or settings, or have no ratio in common; or the
            tolerance is negative or not finite.
    """
    if not 0 <= tolerance < math.inf:  # neither is nan
        raise ValueError(f"tolerance {tolerance}: give a finite number, 0 or more; 0.15 for 15 %")
    _check_alike(table, reference)
    before, now = _ratios(reference), _ratios(table)
    rows = [(*key, before[key], ratio, ratio / before[key]) for key, ratio in now.items() if key in before]
    if not rows:
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
    headings = (*table.columns.key, "ratio", "before", "now", "change")
    return Comparison(tuple(rows), headings, tuple(remarks), tolerance)


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


def _example(ratios: dict[tuple[str, ...], float]) -> str:
    return next((f"{' '.join(key)} and {len(ratios) - 1} more" for key in ratios), "none")
