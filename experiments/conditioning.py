r"""Measure how GW and GN condition the activations of a random network.

The general condition number is :math:`\kappa_p = \lambda_{max} / \lambda_p`, where :math:`\lambda_p` is the
:math:`p d`-th of the d eigenvalues in descending order. "Base" is the plain activation, "BN" the batch-normalized one.

The paper leaves two choices open; the table has all four combinations. Features may be taken before the last ReLU
(where the paper's networks normalize, section 4.2) or after it. The covariance may be taken about the mean or about
zero: :math:`E[x x^T]` determines the curvature of a following linear layer. The figure shows the choice that agrees
with all observations of the paper: before the ReLU, about zero.

Source: Group Whitening, Figure 2; its supplement, Figure 3.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from torch import Tensor

from gw_detectron.errors import ConfigError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.workbench.console import progress_bar

from . import add_random_arguments
from .analysis_result import AnalysisResult, findings_of
from .feasibility import max_groups

PERCENTS = (90, 80)
_LABELS = {"GN": "GN", "GW": "GW, exact", "GW-ItN": "GW, 5 iterations"}
_STYLES = {"GN": "s-", "GW": "o-", "GW-ItN": "^:"}
_SHOWN = {"features": "before ReLU", "moment": "about zero"}  # the choice in the figure
_EPS = 1e-5
# smaller eigenvalues, relative to the largest, are rounding: normalization left no variance there
_ZERO = 1e-10

REDUCED = {"layers": [1, 2], "repeats": 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this experiment to its command."""
    parser.add_argument("--neurons", type=int, default=256, help="d")
    parser.add_argument("--examples", type=int, default=1024, help="m")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[1, 2, 3, 4], help="depths of the MLP"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="random networks; the median is shown"
    )
    add_random_arguments(parser, "one and two layers, 1 repeat")


def analyze_conditioning(
    *,
    neurons: int,
    examples: int,
    layers: Sequence[int],
    repeats: int,
    seed: int,
) -> AnalysisResult:
    """Redraw the conditioning of normalized activations.

    Args:
        neurons: d, of every layer.
        examples: m, Gaussian inputs of the network.
        layers: depths of the network.
        repeats: number of random networks and inputs; the median is shown.
        seed: of everything random.

    Returns:
        One row per depth, choice of features and moment, method and number of groups.

    Raises:
        ConfigError: a size is out of range.
    """
    if (
        neurons < 4
        or examples <= neurons
        or repeats < 1
        or not layers
        or min(layers) < 1
    ):
        raise ConfigError(
            f"neurons={neurons}, examples={examples}, repeats={repeats}, layers={list(layers)}: out of range. "
            "Fix: give 4 or more neurons, more examples than neurons, and 1 or more repeats and layers."
        )
    generator = torch.Generator().manual_seed(seed)
    groups = [g for g in range(1, neurons // 2 + 1) if neurons % g == 0]
    found: dict[tuple, list[tuple[float, ...]]] = {}
    with progress_bar(
        total=repeats * len(layers) * 2, desc="conditioning", unit="layer"
    ) as bar:
        for _ in range(repeats):
            for depth in layers:
                for features, x in _activations(depth, neurons, examples, generator):
                    for (method, g), y in _normalized(x, groups):
                        for moment, matrix in _moments(y):
                            key = (depth, features, moment, method, g)
                            found.setdefault(key, []).append(condition_numbers(matrix))
                    bar.update()
    rows = [
        dict(
            zip(("layers", "features", "moment", "method", "groups"), key, strict=True)
        )
        | _medians(values)
        for key, values in found.items()
    ]
    figure = _draw(rows, layers, neurons, examples)
    return AnalysisResult("conditioning", rows, _findings(rows, neurons), figure)


def condition_numbers(
    moment: Tensor, percents: Iterable[int] = PERCENTS
) -> tuple[float, ...]:
    r"""Compute :math:`\kappa_p` of a symmetric positive semi-definite matrix (d, d), for each p in percent.

    It is infinite if fewer directions than that have variance.
    """
    eigenvalues = torch.linalg.eigvalsh(moment).flip(0)
    places = [
        max(1, round(percent / 100 * len(eigenvalues))) - 1 for percent in percents
    ]
    largest = float(eigenvalues[0])
    smallest = [float(eigenvalues[place]) for place in places]
    return tuple(
        largest / value if value > _ZERO * largest else float("inf")
        for value in smallest
    )


def _activations(
    depth: int, d: int, m: int, generator: torch.Generator
) -> list[tuple[str, Tensor]]:
    """Return the features of a random MLP on Gaussian inputs, before and after the last ReLU."""
    x = torch.randn(m, d, generator=generator, dtype=torch.float64)
    for _ in range(depth):
        layer = torch.empty(d, d + 1, dtype=torch.float64).uniform_(
            -(d**-0.5), d**-0.5, generator=generator
        )
        before = F.linear(x, layer[:, :d], layer[:, d])
        x = before.relu()
    return [("before ReLU", before), ("after ReLU", x)]


def _normalized(
    x: Tensor, groups: Iterable[int]
) -> Iterable[tuple[tuple[str, int | None], Tensor]]:
    yield ("Base", None), x
    yield ("BN", None), F.batch_norm(x, None, None, training=True, eps=_EPS)
    for g in groups:
        yield ("GN", g), F.group_norm(x, g, eps=_EPS)
        if g <= max_groups(x.shape[1], whiten=True):
            for method, solver in (("GW", "zca"), ("GW-ItN", "newton")):
                yield (
                    (method, g),
                    GroupWhitening2d(
                        x.shape[1], g, eps=_EPS, affine=False, solver=solver
                    )(x),
                )


def _moments(x: Tensor) -> Iterable[tuple[str, Tensor]]:
    for name, shifted in (("about the mean", x - x.mean(0)), ("about zero", x)):
        yield name, shifted.T @ shifted / len(x)


def _medians(values: list[tuple[float, ...]]) -> dict[str, float]:
    columns = torch.tensor(values, dtype=torch.float64).quantile(
        0.5, dim=0, interpolation="lower"
    )
    return {
        f"kappa_{percent}%": float(f"{value:.6g}")
        for percent, value in zip(PERCENTS, columns, strict=True)
    }


def _select(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [
        row for row in rows if all(row[key] == value for key, value in wanted.items())
    ]


def _findings(rows: Sequence[dict[str, Any]], neurons: int) -> dict[str, bool]:
    """Check the paper's observations on the choice in the figure, without one group, where GW is GN."""
    shown = _select(rows, **_SHOWN)
    better, growing, batch = [], [], []
    for depth in {row["layers"] for row in shown}:
        curves = {
            method: _select(shown, layers=depth, method=method)
            for method in ("BN", "GN", "GW")
        }
        for percent in PERCENTS:
            key = f"kappa_{percent}%"
            # with more groups a sample's covariance is singular (Table 1, section 4.1)
            gw = {
                row["groups"]: row[key]
                for row in curves["GW"]
                if row["groups"] ** 2 <= neurons
            }
            gn = {row["groups"]: row[key] for row in curves["GN"]}
            better += [gw[g] < gn[g] for g in gw if g > 1]
            growing += [curve[max(gw)] < curve[1] for curve in (gw, gn) if max(gw) > 1]
            if depth > 1:
                batch.append(
                    curves["BN"][0][key] < min(*gw.values(), *(gn[g] for g in gw))
                )
    return findings_of(
        {
            "GW conditions better than GN, for every number of groups up to the square root of the neurons": better,
            "GW and GN condition better with more groups": growing,
            "from two layers on, BN conditions better than GN and GW": batch,
        }
    )


def _draw(
    rows: Sequence[dict[str, Any]], depths: Sequence[int], neurons: int, examples: int
) -> Figure:
    figure = Figure(figsize=(1.4 + 3.3 * len(depths), 6.6), layout="constrained")
    grid = figure.subplots(2, len(depths), squeeze=False, sharex=True)
    for column, depth in enumerate(depths):
        for axes, percent in zip(grid[:, column], PERCENTS, strict=True):
            _draw_curves(
                axes, _select(rows, layers=depth, **_SHOWN), f"kappa_{percent}%"
            )
            axes.set_title(
                rf"$\kappa_{{{percent}\%}}$, {depth} layer{'s' * (depth > 1)}"
            )
        grid[1, column].set_xlabel("groups g")
    for axes in grid[:, 0]:
        axes.set_ylabel("condition number")
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
    figure.suptitle(
        rf"Conditioning of normalized activations, X in $R^{{{neurons} \times {examples}}}$; "
        "curves end where infinite, GW where infeasible"
    )
    return figure


def _draw_curves(axes: Axes, rows: Sequence[dict[str, Any]], key: str) -> None:
    for method, color, dashes in (("Base", "0.4", "--"), ("BN", "tab:purple", "-.")):
        value = _select(rows, method=method)[0][key]
        axes.axhline(value, color=color, linestyle=dashes, linewidth=1.4, label=method)
    for method, label in _LABELS.items():
        points = [
            row for row in _select(rows, method=method) if row[key] < float("inf")
        ]
        places, values = [row["groups"] for row in points], [row[key] for row in points]
        axes.plot(
            places, values, _STYLES[method], markersize=4, linewidth=1.4, label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.grid(alpha=0.3)
