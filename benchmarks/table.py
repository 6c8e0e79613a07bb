"""Tables of measurements, and the CSV files they are kept in."""

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gw_detectron.atomic import atomic_write

from .timing import Quantiles

Row = Mapping[str, str | float | None]


@dataclass(frozen=True)
class Columns:
    """What the rows of a kind of table hold.

    Args:
        key: text, which together names a row.
        numbers: numbers, some of them missing in some rows.
        watched: those of the numbers that are ratios to hold; smaller is better.
        ours: what the key column named first has to begin with for a row to be this package's own.
    """

    key: tuple[str, ...]
    numbers: tuple[str, ...]
    watched: tuple[str, ...]
    ours: tuple[str, tuple[str, ...]]

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.key, *self.numbers, "note")

    @property
    def ratios(self) -> tuple[str, ...]:
        return tuple(name for name in self.numbers if "to_" in name)

    def is_ours(self, row: Row) -> bool:
        column, beginnings = self.ours
        return str(row[column]).startswith(beginnings)


_TIMES = ("repeats", "median_ms", "q20_ms", "q80_ms")
KINDS = {
    "layer": Columns(
        key=("shape", "dtype", "mode", "provider"),
        numbers=(
            *_TIMES,
            *("to_figure1", "to_group_norm", "to_batch_norm", "to_floor", "to_relu_apart"),
            *("saved_mib", "saved_to_group_norm", "peak_mib"),
        ),
        watched=("to_figure1", "to_floor", "saved_to_group_norm"),
        ours=("provider", ("ours",)),
    ),
    "model": Columns(
        key=("model", "variant", "dtype", "batch", "image"),
        numbers=(*_TIMES, "to_bn", "paper_to_bn", "saved_mib", "saved_to_bn", "peak_mib"),
        watched=("to_bn", "saved_to_bn"),
        ours=("variant", ("GW", "BW")),
    ),
}


def time_cells(times: Quantiles, repeats: int) -> dict[str, float]:
    """The cells of a row that say how long a step took."""
    return {"repeats": repeats, "median_ms": times.median, "q20_ms": times.q20, "q80_ms": times.q80}


@dataclass(frozen=True)
class Table:
    """Measurements of one run.

    Args:
        kind: a name in :data:`KINDS`.
        header: machine, versions, settings and command, as text.
        rows: with the columns of the kind. ``note`` says why numbers are missing.
    """

    kind: str
    header: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def columns(self) -> Columns:
        return KINDS[self.kind]


def write_csv(table: Table, path: str | os.PathLike[str]) -> None:
    """Writes a table, its header as lines that begin with ``#``; the file appears whole, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    text = io.StringIO()
    for key, value in {"benchmark": table.kind, **table.header}.items():
        print(f"# {key}: {value}", file=text)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns.all)
    for row in table.rows:
        writer.writerow([_cell(row.get(column)) for column in table.columns.all])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as beside:
        beside.write_text(text.getvalue(), encoding="utf-8")


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def read_csv(path: str | os.PathLike[str]) -> Table:
    """Reads what :func:`write_csv` has written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a table.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no table of measurements {str(path)!r} (looked from {os.getcwd()})")
    # what is no text, such as a picture, has no line with the benchmark's name either
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    header = dict(line[1:].strip().split(": ", 1) for line in lines if line.startswith("#") and ": " in line)
    kind = header.pop("benchmark", "")
    if kind not in KINDS:
        raise ValueError(
            f"{path} is no table of this benchmark: a line '# benchmark: NAME' with one of {sorted(KINDS)} is missing"
        )
    columns = KINDS[kind]
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    missing = [column for column in columns.all if column not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}; it is of another version: measure it again")
    rows = []
    for number, cells in enumerate(reader, start=1):
        if None in cells or None in cells.values():  # what the reader puts for cells too many, and for missing ones
            raise ValueError(
                f"{path}: row {number} does not have the {len(reader.fieldnames or ())} cells of the columns; the file "
                "is cut off or damaged: measure it again"
            )
        try:
            numbers = {column: _number(cells[column]) for column in columns.numbers}
        except ValueError as error:
            raise ValueError(f"{path}: row {number} holds something that is not a number: {error}") from None
        rows.append({**{column: cells[column] for column in (*columns.key, "note")}, **numbers})
    return Table(kind, header, rows)


def _number(cell: str) -> float | None:
    if not cell:
        return None
    number = float(cell)
    if not 0 <= number < math.inf:  # neither is nan
        raise ValueError(f"{cell!r} is no time, size or ratio")
    return number
