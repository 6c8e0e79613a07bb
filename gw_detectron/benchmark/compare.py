"""A run against an earlier one, by its ratios: a machine that is slower as a whole makes no difference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from .table import Row, Table

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

    Rows and ratios that only one of the runs has are not compared; a remark counts them.

    Args:
        table: the run of now.
        reference: the earlier one.
        tolerance: how much larger than before a ratio may be, as a part of it.

    Raises:
        ValueError: the runs are of different benchmarks, devices or settings, or have no ratio in common; or the
            tolerance is negative.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance {tolerance}: give 0 or more, 0.15 for 15 %")
    check_reference(reference, table.kind, table.header)
    columns = table.columns
    before_rows, now_rows = _ours(reference), _ours(table)
    rows = []
    for key, now in now_rows.items():
        before = before_rows.get(key, {})
        for name in columns.watched:
            a, b = before.get(name), now.get(name)
            if a and b:
                rows.append((*key, name, float(a), float(b), float(b) / float(a)))
    if not rows:
        raise ValueError(
            "the reference and this run have no ratio in common: measure the same shapes, dtypes and models"
        )
    remarks = [
        f"Another {name} than before: {table.header.get(name)}, before {reference.header.get(name)}."
        for name in ("machine", "threads", "torch", "GW_DETECTRON_KERNELS")
        if table.header.get(name) != reference.header.get(name)
    ]
    alone = len(before_rows.keys() ^ now_rows.keys())
    if alone:
        remarks.append(f"{alone} rows are in one of the two runs only and are not compared.")
    return Comparison(tuple(rows), (*columns.key, "ratio", "before", "now", "change"), tuple(remarks), tolerance)


def check_reference(reference: Table, kind: str, header: Mapping[str, str]) -> None:
    """Raises ValueError if a run of this kind and with this header cannot be compared with the reference."""
    if kind != reference.kind:
        raise ValueError(f"the reference is a table of the benchmark {reference.kind!r}, this run is one of {kind!r}")
    for name in ("device", "settings"):
        before, now = reference.header.get(name), header.get(name)
        if before != now:
            raise ValueError(
                f"the reference was measured with {name} {before}, this run is with {now}: their ratios cannot be "
                "compared. Name a reference of the same kind, or measure one"
            )


def _ours(table: Table) -> dict[tuple[str, ...], Row]:
    rows = (row for row in table.rows if table.columns.is_ours(row))
    return {tuple(str(row[column]) for column in table.columns.key): row for row in rows}
