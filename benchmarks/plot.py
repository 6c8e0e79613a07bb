"""Plot a table of measurements as a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gw_detectron.atomic import atomic_write

from .providers import PROVIDERS
from .table import Row, Table

_COLORS = {name: f"C{index}" for index, name in enumerate(PROVIDERS)}


def plot(table: Table, path: Path) -> None:
    """Plot a table, atomically.

    ``layer``: the time of each provider at each shape, from the 20 % to the 80 % quantile, and the memory saved for
    backward as a multiple of GroupNorm's. ``model``: training iterations as multiples of BN's, with the paper's.
    ``detector``: predictions as multiples of the first detector's. ``kernels``: launches as multiples of a copy of as
    many bytes, or these bytes if nothing was timed.

    Raises:
        OSError: the file cannot be written.
    """
    plots = {"layer": _plot_layers, "model": _plot_models, "detector": _plot_detectors, "kernels": _plot_kernels}
    figure = plots[table.kind](table)
    figure.suptitle(_title(table.header), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=80, format="png")


def _title(header: Mapping[str, str]) -> str:
    """Name machine, threads, version and settings: "AMD EPYC, 2 threads, torch 2.14.1"."""
    forms = {"machine": "{}", "threads": "{} threads", "torch": "torch {}", "settings": "{}"}
    return ", ".join(form.format(header[name]) for name, form in forms.items() if name in header)


def _plot_layers(table: Table) -> Figure:
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in table.rows:
        panels.setdefault((row["dtype"], row["mode"]), []).append(row)
    # stacked, so that a panel has the full width of a page
    figure = Figure(figsize=(12, 3.4 * len(panels) + 0.6), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False)
    for (key, rows), axes in zip(panels.items(), grid[:, 0], strict=True):
        _plot_bars(axes, rows)
        axes.set_title(", ".join(key))
    grid[-1, 0].set_xlabel("N x C x H x W of the input")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _plot_bars(axes: Axes, rows: Sequence[Row]) -> None:
    timed = any(row.get("median_ms") for row in rows)
    value = "median_ms" if timed else "saved_to_group_norm"
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    width = 0.8 / len(providers)
    for index, provider in enumerate(providers):
        own = [row for row in rows if row["provider"] == provider and row.get(value)]
        places = [shapes.index(row["shape"]) + (index - (len(providers) - 1) / 2) * width for row in own]
        bars = [row[value] for row in own]
        spread = None
        if timed and own:
            spread = [[row[value] - row["q20_ms"] for row in own], [row["q80_ms"] - row[value] for row in own]]
        axes.bar(places, bars, width, yerr=spread, label=provider, color=_COLORS.get(provider))
    axes.set_xticks(range(len(shapes)), shapes, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    if timed:
        axes.set_yscale("log")
    axes.set_ylabel("time (ms)" if timed else "saved for backward, GroupNorm = 1")


def _plot_models(table: Table) -> Figure:
    rows = [row for row in table.rows if row.get("to_bn")]
    names = [f"{row['model']} {row['variant']}, {row['dtype']}, {row['batch']} x {row['image']}" for row in rows]
    figure = _plot_rows(rows, names, "to_bn", "time of an iteration, BN (detector: FrozenBN) = 1")
    (axes,) = figure.axes
    axes.containers[0].set_label("this run")
    published = [(row["paper_to_bn"], place) for place, row in enumerate(rows) if row.get("paper_to_bn")]
    if published:
        axes.plot(*zip(*published, strict=True), "k|", markersize=12, label="the paper, V100")
    axes.axvline(1, color="k", linewidth=0.8)
    axes.legend(fontsize=10)
    return figure


def _plot_detectors(table: Table) -> Figure:
    names = [row["detector"] for row in table.rows]
    return _plot_rows(table.rows, names, "to_first", f"time of a prediction, {names[0]} = 1")


def _plot_kernels(table: Table) -> Figure:
    names = [" ".join(row[name] for name in table.columns.key) for row in table.rows]
    if any(row.get("to_copy") for row in table.rows):
        return _plot_rows(table.rows, names, "to_copy", "time of a launch, a copy of as many bytes = 1")
    return _plot_rows(table.rows, names, "mib", "MiB read and written by a launch")


def _plot_rows(rows: Sequence[Row], names: Sequence[str], value: str, label: str) -> Figure:
    figure = Figure(figsize=(11, 1.2 + 0.26 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(rows)), [row.get(value) or 0 for row in rows])
    axes.set_yticks(range(len(rows)), names, fontsize=10)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    return figure
