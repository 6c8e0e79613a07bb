"""Compare a run with an earlier one by ratios, which do not depend on the speed of the machine.

The ratio of two times at one size varies far more by chance than the mean over all sizes. The mean therefore has the
smaller tolerance.
"""

import math
from collections import defaultdict
from statistics import geometric_mean
from typing import NamedTuple

from tabulate import tabulate

from gw_detectron.errors import ConfigError

from .table import Table

TOLERANCE = 0.2
#: multiple of the tolerance for a ratio of times at one size among several: about a doubling by default
SINGLE_SIZE_FACTOR = 5
#: tolerance of a ratio of bytes, which are counted and do not vary by chance
BYTES_TOLERANCE = 0.02


class Change(NamedTuple):
    """A ratio in both runs. ``allowed`` is the largest accepted growth, as a fraction."""

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


class Comparison(NamedTuple):
    """Ratios with their geometric means, as a table for print, and differences that make the runs less comparable."""

    rows: list[Change]
    headings: tuple[str, ...]
    notes: list[str]

    @property
    def worse(self) -> list[Change]:
        """The ratios that grew by more than allowed."""
        return [row for row in self.rows if row.worse]

    def __str__(self) -> str:
        cells = []
        for row in self.rows:
            numbers = (f"{row.before:.3g}", f"{row.now:.3g}", f"{row.growth:+.1%}", f"{row.allowed:+.0%}")
            cells.append((*row.key, *numbers, "WORSE" * row.worse))
        headings = (*self.headings, "before", "now", "change", "allowed", "")
        total = f"{len(self.worse)} of {len(self.rows)} ratios are worse than allowed."
        return "\n".join([tabulate(cells, headers=headings, disable_numparse=True), *self.notes, total])


def compare(table: Table, reference: Table, tolerance: float = TOLERANCE) -> Comparison:
    """Compare the ratios of this package's layers with an earlier run.

    Ratios of only one run are not compared; a note counts them.

    Args:
        table: the present run.
        reference: the earlier run.
        tolerance: largest accepted growth, as a fraction, of a geometric mean of ratios of times, and of a ratio that
            has no mean. A ratio of times at one size among several can grow :data:`SINGLE_SIZE_FACTOR` times as much,
            a ratio of bytes by :data:`BYTES_TOLERANCE` or the tolerance, whichever is less.

    Raises:
        ConfigError: the runs differ in benchmark, device or settings, or have no ratio in common; or the tolerance
            is negative or not finite.
    """
    if not 0 <= tolerance < math.inf:  # also refuses nan
        raise ConfigError(f"--tolerance ({tolerance}): not a finite number >= 0. Fix: give 0.2 for 20 %.")
    same: dict[str, tuple[str | None, str | None]] = {"benchmark": (reference.kind, table.kind)}
    same |= {name: (reference.header.get(name), table.header.get(name)) for name in ("device", "settings")}
    for name, (before, now) in same.items():
        if before != now:
            reason = f"{name} of the table is {before!r}, of this run {now!r}"
            raise ConfigError(f"--compare: {reason}. Fix: give a table with the same {name}.")
    old, new = _watched_ratios(reference), _watched_ratios(table)
    shared = [key for key in new if key in old]
    if not shared:
        raise ConfigError(
            f"--compare: no ratio in common: the table has {_example(old)}, this run has {_example(new)}. "
            f"Fix: measure the same {table.columns.key[0]}s, dtypes and baselines."
        )
    notes = [
        f"Different {name}: {table.header.get(name)}, before {reference.header.get(name)}."
        for name in ("machine", "threads", "torch", "GW_DETECTRON_KERNELS")
        if table.header.get(name) != reference.header.get(name)
    ]
    for run, alone in (("earlier", old.keys() - new.keys()), ("present", new.keys() - old.keys())):
        if alone:
            notes.append(f"{len(alone)} ratios are in the {run} run only and are not compared.")
    sizes = defaultdict(list)  # by the key without the shape of a layer or the name of a model
    for key in shared:
        sizes[key[1:]].append(key)
    rows, means = [], []
    for key in shared:
        allowed = tolerance * (SINGLE_SIZE_FACTOR if len(sizes[key[1:]]) > 1 else 1)
        rows.append(Change(key, old[key], new[key], min(BYTES_TOLERANCE, tolerance) if _is_bytes(key) else allowed))
    for rest, keys in sizes.items():
        if len(keys) > 1 and not _is_bytes(rest):
            mean_before, mean_now = (geometric_mean(run[key] for key in keys) for run in (old, new))
            means.append(Change((f"mean of {len(keys)}", *rest), mean_before, mean_now, tolerance))
    return Comparison([*rows, *means], (*table.columns.key, "ratio"), notes)


def _watched_ratios(table: Table) -> dict[tuple[str, ...], float]:
    """Return the compared ratios by the key of their row and their name."""
    columns = table.columns
    return {
        (*(row[column] for column in columns.key), name): ratio
        for row in table.rows
        if columns.is_ours(row)
        for name in columns.watched
        if (ratio := row.get(name))
    }


def _is_bytes(key: tuple[str, ...]) -> bool:
    return key[-1].startswith("saved_")


def _example(ratios: dict[tuple[str, ...], float]) -> str:
    return next((f"{' '.join(key)} and {len(ratios) - 1} more" for key in ratios), "none")
