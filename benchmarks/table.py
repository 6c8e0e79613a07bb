"""Tables of measurements: a CSV file, text and a plot."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from gw_detectron.atomic import atomic_write, write_text

Row = Mapping[str, Any]  # text in the key columns, a number or None in the others

#: the text columns that identify a row, and the columns that are plotted
KINDS = {
    "layer": (("shape", "dtype", "mode", "provider"), ("median_ms", "saved_mib")),
    "model": (("model", "variant", "dtype", "batch", "image"), ("to_bn",)),
    "kernels": (("shape", "dtype", "kernel", "setting"), ("to_copy", "mib")),
    "detector": (("detector", "image"), ("to_first",)),
}


@dataclass(frozen=True)
class Table:
    """Measurements of one run.

    Args:
        kind: a name in :data:`KINDS`.
        header: machine, versions, settings and command, as text.
        rows: with the key columns of the kind. ``note`` is the reason of missing numbers.
    """

    kind: str
    header: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def key(self) -> tuple[str, ...]:
        return KINDS[self.kind][0]

    @property
    def numbers(self) -> list[str]:
        """The columns of numbers, in the order of their first value."""
        found = dict.fromkeys(
            name
            for row in self.rows
            for name, value in row.items()
            if value is not None
        )
        return [name for name in found if name not in (*self.key, "note")]


def note_of(error: Exception) -> str:
    """Return the note of a row that could not be measured."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def write_csv(table: Table, path: Path) -> None:
    """Write a table atomically, its header as lines that begin with ``#``."""
    text = io.StringIO()
    for key, value in {"benchmark": table.kind, **table.header}.items():
        print(f"# {key}: {value}", file=text)
    writer = csv.writer(text, lineterminator="\n")
    columns = [*table.key, *table.numbers, "note"]
    writer.writerow(columns)
    for row in table.rows:
        cells = [row.get(column) for column in columns]
        writer.writerow(
            [f"{cell:.5g}" if isinstance(cell, float) else cell for cell in cells]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def summary(table: Table) -> str:
    """Format the header, the rows, and the geometric means of a layer's ratios over the shapes."""
    parts = ["\n".join(f"{key}: {value}" for key, value in table.header.items())]
    parts.append(_grid(table.rows, [*table.key, *table.numbers, "note"]))
    if table.kind == "layer":
        ratios = [name for name in table.numbers if "to_" in name]
        parts.append(
            "geometric means over the shapes\n"
            + _grid(geometric_means(table.rows, ratios), MEANS + ratios)
        )
    return "\n\n".join(parts)


MEANS = ["dtype", "mode", "provider"]


def geometric_means(rows: Sequence[Row], ratios: Sequence[str]) -> list[Row]:
    """Compute geometric means of ratios over the shapes; None where a shape has no ratio."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in MEANS), []).append(row)
    return [
        dict(zip(MEANS, key, strict=True))
        | {
            name: geometric_mean(row[name] for row in own)
            if all(row.get(name) for row in own)
            else None
            for name in ratios
        }
        for key, own in groups.items()
    ]


def _grid(rows: Sequence[Row], names: Sequence[str]) -> str:
    shown = [
        name for name in names if any(row.get(name) not in (None, "") for row in rows)
    ]
    from tabulate import tabulate  # not installed in every image for GPUs

    return tabulate(
        [[row.get(name) for name in shown] for row in rows],
        headers=shown,
        floatfmt=".3f",
        missingval="-",
    )


def plot(table: Table, path: Path) -> None:
    """Plot the rows as a PNG, atomically; bars of one color have the last key in common."""
    from matplotlib.figure import Figure

    wanted = [name for name in KINDS[table.kind][1] if name in table.numbers]
    values = {name: [row for row in table.rows if row.get(name)] for name in wanted}
    height = 1 + 0.2 * sum(map(len, values.values()))
    figure = Figure(figsize=(11, min(height, 200)), layout="constrained")
    axes = figure.subplots(
        max(1, len(values)),
        squeeze=False,
        height_ratios=[len(rows) for rows in values.values()],
    )
    for (name, rows), panel in zip(values.items(), axes[:, 0], strict=False):
        colors = {
            last: f"C{index % 10}"
            for index, last in enumerate(
                dict.fromkeys(row[table.key[-1]] for row in rows)
            )
        }
        panel.barh(
            range(len(rows)),
            [row[name] for row in rows],
            color=[colors[row[table.key[-1]]] for row in rows],
        )
        panel.set_yticks(
            range(len(rows)),
            [" ".join(row[key] for key in table.key) for row in rows],
            fontsize=8,
        )
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.set_xlabel(name)
        panel.grid(axis="x", alpha=0.3)
        if max(row[name] for row in rows) > 20 * min(row[name] for row in rows):
            panel.set_xscale("log")
    shown = {
        "machine": "{}",
        "threads": "{} threads",
        "torch": "torch {}",
        "settings": "{}",
    }
    title = ", ".join(
        form.format(table.header[name])
        for name, form in shown.items()
        if name in table.header
    )
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=80, format="png")
