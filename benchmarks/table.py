"""Tables of measurements and their CSV files."""

import csv
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gw_detectron.atomic import atomic_write
from gw_detectron.errors import DataError, MissingFileError

Row = Mapping[str, Any]  # text in the key columns, a number or None in the others


@dataclass(frozen=True)
class Columns:
    """The columns of a kind of table.

    Args:
        key: text columns, which together identify a row.
        numbers: numeric columns; a cell can be empty.
        watched: the numeric columns that are compared with an earlier run; smaller is better.
        is_ours: whether a row is of this package's layers.
    """

    key: tuple[str, ...]
    numbers: tuple[str, ...]
    watched: tuple[str, ...]
    is_ours: Callable[[Row], bool]

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.key, *self.numbers, "note")

    @property
    def ratios(self) -> tuple[str, ...]:
        return tuple(name for name in self.numbers if "to_" in name)


_TIMES = ("repeats", "median_ms", "q20_ms", "q80_ms")
KINDS = {
    "layer": Columns(
        key=("shape", "dtype", "mode", "provider"),
        numbers=(
            *_TIMES,
            *("to_figure1", "to_group_norm", "to_batch_norm", "to_floor", "to_relu_apart"),
            *("loaded_ms", "loaded_to_figure1"),
            *("saved_mib", "saved_to_group_norm", "peak_mib"),
        ),
        watched=("to_figure1", "to_floor", "saved_to_group_norm"),
        is_ours=lambda row: row["provider"].startswith("ours"),
    ),
    "model": Columns(
        key=("model", "variant", "dtype", "batch", "image"),
        numbers=(*_TIMES, "to_bn", "paper_to_bn", "saved_mib", "saved_to_bn", "peak_mib"),
        watched=("to_bn", "saved_to_bn"),
        is_ours=lambda row: row["variant"].startswith(("GW", "BW")),
    ),
    "kernels": Columns(
        key=("shape", "dtype", "kernel", "setting"),
        numbers=("programs", "warps", "stages", "registers", "stack", "shared_kib", "mib", *_TIMES, "to_copy"),
        watched=("to_copy",),
        is_ours=lambda row: True,
    ),
    "detector": Columns(
        key=("detector", "image"),
        numbers=(*_TIMES, "to_first"),
        watched=("to_first",),
        is_ours=lambda row: True,
    ),
}


@dataclass(frozen=True)
class Table:
    """Measurements of one run.

    Args:
        kind: a name in :data:`KINDS`.
        header: machine, versions, settings and command, as text.
        rows: with the columns of the kind. ``note`` is the reason of missing numbers.
    """

    kind: str
    header: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def columns(self) -> Columns:
        return KINDS[self.kind]


def note_of(error: Exception) -> str:
    """Return the note of a row that could not be measured."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def write_csv(table: Table, path: Path) -> None:
    """Write a table atomically, its header as lines that begin with ``#``.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    for key, value in {"benchmark": table.kind, **table.header}.items():
        print(f"# {key}: {value}", file=text)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns.all)
    for row in table.rows:
        cells = [row.get(column) for column in table.columns.all]
        writer.writerow([f"{cell:.5g}" if isinstance(cell, float) else cell for cell in cells])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def read_csv(path: str | os.PathLike[str], argument: str = "--compare") -> Table:
    """Read a table written by :func:`write_csv`.

    Args:
        path: the file.
        argument: for messages.

    Raises:
        MissingFileError: the file does not exist.
        DataError: it is not such a table, or damaged.
    """
    if not Path(path).is_file():
        fix = "Fix: give a table that tools/benchmark.py wrote."
        raise MissingFileError(f"{argument} ({str(path)!r}): file not found (cwd: {os.getcwd()}). {fix}")
    # a binary file, such as a picture, has no benchmark line either
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    header = dict(line[1:].strip().split(": ", 1) for line in lines if line.startswith("#") and ": " in line)
    kind = header.pop("benchmark", "")
    if kind not in KINDS:
        raise _unusable(argument, path, f"no line '# benchmark: NAME' with a name of {sorted(KINDS)}")
    columns = KINDS[kind]
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    fields = reader.fieldnames or ()
    if missing := [column for column in columns.all if column not in fields]:
        raise _unusable(argument, path, f"columns {', '.join(missing)} are missing")
    rows = []
    for number, cells in enumerate(reader, start=1):
        if None in cells or None in cells.values():  # how csv marks surplus and missing cells
            raise _unusable(argument, path, f"row {number} does not have {len(fields)} cells")
        try:
            numbers = {column: _parse_number(cells[column]) for column in columns.numbers}
        except ValueError as error:
            raise _unusable(argument, path, f"row {number}: {error}") from None
        rows.append({**{column: cells[column] for column in (*columns.key, "note")}, **numbers})
    return Table(kind, header, rows)


def find_csv(folder: Path, kind: str, machine: str) -> Path:
    """Return the table of a folder that was measured on a machine of this name.

    Raises:
        MissingFileError: there is none.
    """
    machines = {}
    for path in sorted(folder.glob("*.csv")):
        table = read_csv(path)
        if table.kind == kind:
            machines[path.name] = table.header.get("machine", "")
            if machines[path.name] == machine:
                return path
    raise MissingFileError(
        f"--compare ({str(folder)!r}): no table of {kind!r} for {machine!r}, only for {machines}. "
        "Fix: measure one with --output FILE, or give the table of another machine."
    )


def _unusable(argument: str, path: str | os.PathLike[str], reason: str) -> DataError:
    return DataError(f"{argument} ({str(path)!r}): no table of this benchmark: {reason}. Fix: measure it again.")


def _parse_number(cell: str) -> float | None:
    if not cell:
        return None
    number = float(cell)
    if not 0 <= number < math.inf:  # also refuses nan
        raise ValueError(f"{cell!r} is not a time, size or ratio")
    return number
