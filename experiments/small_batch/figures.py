"""Figures of the small-batch study."""

import statistics
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from .plan import DECIDING_BATCH, OTHER_BATCHES
from .tables import Results, grid, scored

_COLORS = {"BN": "tab:blue", "BN+GN": "tab:olive", "GN": "tab:green", "BN+GW": "tab:red", "GW": "tab:purple"}
_SHOWN = tuple(_COLORS)


def ap_figure(results: Results) -> Figure:
    """AP of the five deciding norms at their own learning rates, and over learning rates."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    bars, rates = figure.subplots(1, 2)
    for place, norm in enumerate(_SHOWN):
        values = list(scored(results, norm).values())
        if values:
            bars.bar(place, statistics.mean(values), color=_COLORS[norm], alpha=0.45, width=0.7)
            bars.plot([place] * len(values), values, "o", color=_COLORS[norm], markersize=5)
        curve = grid(results, norm)
        rates.plot(list(curve), list(curve.values()), "o-", color=_COLORS[norm], label=norm, markersize=4)
    bars.set_xticks(range(len(_SHOWN)), _SHOWN)
    bars.set(title="Each norm at its best learning rate, 5 seeds", ylabel="box AP, 2 images per batch")
    rates.set(title="Over the learning rate, 1 seed", xlabel="SOLVER.BASE_LR")
    _log_axis(rates)
    for axes in (bars, rates):
        axes.set_ylim(bottom=0)
        _finish(axes)
    return figure


def batch_figure(results: Results) -> Figure:
    """AP of the five deciding norms over batch sizes, each at its own learning rate."""
    figure = Figure(figsize=(5.4, 3.9), layout="constrained")
    axes = figure.subplots()
    for norm in _SHOWN:
        sizes = {
            batch: statistics.mean(found.values())
            for batch in sorted((DECIDING_BATCH, *OTHER_BATCHES))
            if (found := scored(results, norm, batch))
        }
        axes.plot(list(sizes), list(sizes.values()), "o-", color=_COLORS[norm], label=norm, markersize=4)
    axes.set(title="Over the images per batch", xlabel="SOLVER.IMS_PER_BATCH", ylabel="box AP")
    _log_axis(axes)
    axes.set_ylim(bottom=0)
    _finish(axes)
    return figure


def mechanism_figure(results: Results) -> Figure:
    """BN's gap over batch sizes, and the condition numbers of features, by layer."""
    figure = Figure(figsize=(12.5, 4.6), layout="constrained")
    gaps, kappas = figure.subplots(1, 2)
    for batch in sorted((DECIDING_BATCH, *OTHER_BATCHES)):
        _draw_layers(gaps, results, "BN", batch, "gap", {"label": f"BN, batch {batch}"})
    for norm in _SHOWN:
        _draw_layers(kappas, results, norm, DECIDING_BATCH, "kappa", {"label": norm, "color": _COLORS[norm]})
    gaps.set(title="BN: output by batch against running statistics", ylabel="root mean square difference")
    kappas.set(title="Inputs of convolutions, 2 images", ylabel=r"$\kappa_{90\%}$", yscale="log")
    for axes in (gaps, kappas):
        axes.tick_params(axis="x", rotation=90, labelsize=7)
        _finish(axes)
    return figure


def loss_figure(results: Results) -> Figure:
    """Training loss of the deciding norms at batch 2 (seed 1) and at their own learning rates."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for norm in _SHOWN:
        for row, result in results.items():
            if (row.norm, row.batch, row.seed) == (norm, DECIDING_BATCH, 1):
                axes.plot(
                    *zip(*_continued(result["losses"]), strict=True), color=_COLORS[norm], label=f"{norm}, {row.lr:g}"
                )
    axes.set(xlabel="iteration", ylabel="loss", title="Training loss, 2 images, seed 1")
    _finish(axes)
    return figure


def _continued(losses: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Drop what a run that continued from a checkpoint had done after it."""
    kept: list[tuple[int, float]] = []
    for iteration, loss in losses:
        while kept and kept[-1][0] >= iteration:
            kept.pop()
        kept.append((iteration, loss))
    return kept


def _draw_layers(axes: Axes, results: Results, norm: str, batch: int, kind: str, style: dict[str, str]) -> None:
    """Draw the mean over seeds of a statistic by layer."""
    runs = [
        result["features"][kind]
        for row, result in results.items()
        if (row.norm, row.batch, row.split) == (norm, batch, "val") and result["features"]
    ]
    if runs:
        layers = [layer for layer in runs[0] if all(run[layer] is not None for run in runs)]
        axes.plot(
            layers, [statistics.mean(run[layer] for run in runs) for layer in layers], "o-", markersize=4, **style
        )


def _log_axis(axes: Axes) -> None:
    places = sorted({float(x) for line in axes.get_lines() for x in line.get_xdata()})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
