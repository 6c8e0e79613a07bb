"""Format a table of measurements as text."""

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from tabulate import tabulate

from .table import Row, Table


def summary(table: Table) -> str:
    """Format the header, the rows by dtype and mode, the geometric means of a layer's ratios, and the notes."""
    parts = ["\n".join(f"{key}: {value}" for key, value in table.header.items())]
    titles = [name for name in ("dtype", "mode") if name in table.columns.key]
    names = [name for name in table.columns.all if name not in (*titles, "note")]
    groups: dict[str, list[Row]] = {}
    for row in table.rows:
        groups.setdefault(", ".join(row[name] for name in titles), []).append(row)
    for title, rows in groups.items():
        parts.append(f"{title}\n{_grid(rows, names)}")
        if table.kind == "layer":
            ratios = table.columns.ratios
            means = _grid(geometric_means(rows, ratios), ["provider", *ratios])
            parts.append(f"{title}, geometric means over the shapes\n{means}")
    notes = [
        " ".join(row[name] for name in table.columns.key) + f": {row['note']}" for row in table.rows if row["note"]
    ]
    return "\n\n".join([*parts, *(["\n".join(["not measured", *notes])] if notes else [])])


def geometric_means(rows: Sequence[Row], ratios: Sequence[str]) -> list[Row]:
    """Compute geometric means of ratios over the shapes, by provider; None where a shape has no ratio."""
    means: list[Row] = []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        mean = {"provider": provider}
        for name in ratios:
            values: list[Any] = [row.get(name) for row in rows if row["provider"] == provider]
            mean[name] = geometric_mean(values) if all(values) else None
        means.append(mean)
    return means


def _grid(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Format rows without empty columns."""
    shown = [name for name in names if any(row.get(name) is not None for row in rows)]
    cells = [[_text(row.get(name)) for name in shown] for row in rows]
    align = ["left" if isinstance(rows[0].get(name), str) else "right" for name in shown]
    return tabulate(cells, headers=shown, disable_numparse=True, colalign=align)


def _text(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
