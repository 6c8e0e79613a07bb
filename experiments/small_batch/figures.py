"""Figures of the small-batch study."""

import statistics
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from .plan import DECIDING_BATCH, EQUAL_TIME, OTHER_BATCH_SEED, OTHER_BATCHES, planned_iterations
from .tables import Results, grid, losses, mean_features, scored, scored_rows

#: color and marker of the norms in the figures: the deciding ones, and the rival that is trained at all batch sizes
_STYLES: dict[str, dict[str, Any]] = {
    "BN": {"color": "tab:blue", "marker": "o"},
    "BN+GN": {"color": "tab:olive", "marker": "s"},
    "GN": {"color": "tab:green", "marker": "^"},
    "BN+GW": {"color": "tab:red", "marker": "D"},
    "GW": {"color": "tab:purple", "marker": "v"},
    "GN+WS": {"color": "tab:gray", "marker": "P"},
}
#: panel of the variations -> their names and labels
_VARIED: dict[str, dict[str, str]] = {
    "Positions of GW, BN elsewhere": {
        "BN": "none",
        "BN+GN_S1": "S1\nwith GN",
        "BN+GW_S1": "S1",
        "BN+GN_S1-B1": "S1-B1\nwith GN",
        "BN+GW_S1-B1": "S1-B1",
        "BN+GW": "S1-B2",
        "BN+GW_S1-B12": "S1-B12",
        "GW": "all",
    },
    "Groups, GW everywhere": {"GW_g8": "8", "GW_g16": "16", "GW_g32": "32", "GW": "64"},
    "Newton steps T, or zca": {"GW_T3": "T=3", "GW": "T=5", "GW_T7": "T=7", "GW_zca": "zca"},
}
_SHORT = planned_iterations(DECIDING_BATCH)
_FIRST_LOSS = 200  # the fall before it hides the rest


def ap_figure(results: Results) -> Figure:
    """AP of the norms at their own learning rates, short and long, and over learning rates."""
    figure = Figure(figsize=(13, 4.1), layout="constrained")
    figure.suptitle(
        f"Box AP of a small detector, from scratch, synthetic images, {DECIDING_BATCH} per batch", fontsize=11
    )
    *bars, rates = figure.subplots(1, 1 + len(EQUAL_TIME))
    for axes, iterations in zip(bars, EQUAL_TIME, strict=True):
        _ap_bars(axes, results, iterations)
    for norm, style in _STYLES.items():
        curve = grid(results, norm)
        rates.plot(list(curve), list(curve.values()), label=norm, markersize=6, fillstyle="none", **style)
    rates.set(title=f"{_SHORT} iterations over the learning rate, 1 seed", xlabel="SOLVER.BASE_LR")
    _log_axis(rates)
    for axes in (*bars, rates):
        axes.set_ylim(bottom=0)
        _finish(axes)
    return figure


def _ap_bars(axes: Axes, results: Results, iterations: int) -> None:
    """Draw AP after as many iterations, and in about the time of as many with GW."""
    equal_time: dict[int, float] = {}  # mean AP by the place of the bar
    found = {
        norm: values for norm in _STYLES if (values := list(scored(results, norm, iterations=iterations).values()))
    }
    for place, (norm, values) in enumerate(found.items()):
        style = _STYLES[norm]
        axes.bar(place, statistics.mean(values), color=style["color"], alpha=0.45, width=0.7)
        _spread_points(axes, place, values, style)
        if longer := scored(results, norm, iterations=EQUAL_TIME[iterations]):
            equal_time[place] = statistics.mean(longer.values())
    if equal_time:
        label = f"{EQUAL_TIME[iterations]} iterations, about the time of GW's {iterations}"
        axes.bar(list(equal_time), list(equal_time.values()), width=0.7, fill=False, linestyle="--", label=label)
        axes.margins(y=0.2)  # room for the legend
    axes.set_xticks(range(len(found)), list(found))
    axes.set(title=f"{iterations} iterations, {_seeds(found.values())}", ylabel="box AP")


def _spread_points(axes: Axes, place: float, values: list[float], style: dict[str, Any]) -> None:
    """Draw the values of single seeds beside each other."""
    places = [place + 0.1 * (i - (len(values) - 1) / 2) for i in range(len(values))]
    axes.plot(places, values, linestyle="", markersize=5, **style)


def batch_figure(results: Results) -> Figure:
    """AP of the common seed over batch sizes, each norm at its own learning rate."""
    figure = Figure(figsize=(5.4, 3.9), layout="constrained")
    axes = figure.subplots()
    for norm, style in _STYLES.items():
        sizes = {
            batch: found[OTHER_BATCH_SEED]
            for batch in sorted((DECIDING_BATCH, *OTHER_BATCHES))
            if OTHER_BATCH_SEED in (found := scored(results, norm, batch))
        }
        axes.plot(list(sizes), list(sizes.values()), label=norm, markersize=5, **style)
    axes.set(title="4000 images seen, 1 seed", xlabel="images per batch", ylabel="box AP")
    _log_axis(axes)
    axes.margins(y=0.2)
    axes.set_ylim(bottom=0)
    _finish(axes)
    return figure


def variation_figure(results: Results) -> Figure:
    """AP over the positions, groups and steps of GW."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(_VARIED), sharey=True, width_ratios=[len(labels) for labels in _VARIED.values()])
    for axes, (title, labels) in zip(panels, _VARIED.items(), strict=True):
        for place, norm in enumerate(labels):
            values = list(scored(results, norm).values())
            style = _STYLES.get(norm, {"color": "tab:gray", "marker": "o"})
            if values:
                axes.bar(place, statistics.mean(values), color=style["color"], alpha=0.45, width=0.7)
            _spread_points(axes, place, values, style)
        axes.set_xticks(range(len(labels)), list(labels.values()))
        axes.set(title=title, xlim=(-0.6, len(labels) - 0.4))
        _finish(axes)
    panels[0].set(ylabel="box AP")
    return figure


def mechanism_figure(results: Results) -> Figure:
    """BN's gap, and the condition numbers of features, by layer."""
    figure = Figure(figsize=(12.5, 4.8), layout="constrained")
    gaps, kappas = figure.subplots(1, 2)
    for norm, style in _STYLES.items():
        gap, kappa = (mean_features(results, norm, kind) for kind in ("gap", "kappa"))
        if gap:  # without lines: mixtures have BN in some layers
            gaps.plot(list(gap), list(gap.values()), label=norm, linestyle="", markersize=7, fillstyle="none", **style)
        if kappa:
            kappas.plot(list(kappa), list(kappa.values()), label=norm, markersize=5, **style)
    gaps.set(
        title="BN layers: output by batch against running statistics",
        xlabel="BN after the convolution",
        ylabel="root mean square difference",
    )
    gaps.set_ylim(bottom=0)
    kappas.set(title="Inputs of convolutions", xlabel="convolution", ylabel=r"$\kappa_{90\%}$", yscale="log")
    for axes in (gaps, kappas):
        axes.tick_params(axis="x", rotation=90, labelsize=9)
        _finish(axes)
    return figure


def loss_figure(results: Results) -> Figure:
    """Training loss of the norms at batch 2 and at their own learning rates, averaged over seeds."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for norm, style in _STYLES.items():
        curves = [losses(results, row) for row in scored_rows(results, norm)]
        if not curves:
            continue
        places = [place for place in curves[0] if _FIRST_LOSS <= place <= min(max(curve) for curve in curves)]
        values = [[float(v) for v in np.interp(places, list(curve), list(curve.values()))] for curve in curves]
        axes.plot(
            places, [statistics.mean(column) for column in zip(*values, strict=True)], label=norm, markersize=4, **style
        )
    seeds = _seeds(scored(results, norm) for norm in _STYLES)
    axes.set(xlabel="iteration", ylabel="loss", title=f"Training loss, mean of {seeds}")
    _finish(axes)
    return figure


def _seeds(by_norm: Iterable[Collection[Any]]) -> str:
    """Say how many seeds the norms have that have any: "3 to 5 seeds"."""
    counts = sorted({len(values) for values in by_norm} - {0}) or [0]
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + (" seed" if counts[-1] == 1 else " seeds")


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
