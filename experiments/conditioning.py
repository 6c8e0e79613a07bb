r"""How well GW and GN condition the activations of a random network, over the number of groups.

The general condition number is :math:`\kappa_p = \lambda_{max} / \lambda_p`, where :math:`\lambda_p` is the
:math:`p d`-th of the d eigenvalues in descending order. "Base" is the activation as it is, "BN" the batch normalised
one.

The paper leaves two things open, and the table holds every reading of them. Features of an MLP may be taken before the
last ReLU (where its networks have their normalisation, section 4.2) or after it. And the covariance may be taken about
the mean, or about zero: :math:`E[x x^T]` is what the curvature of a following linear layer is made of. The picture
shows the reading in which all that the paper observes can be seen: before the ReLU, about zero.

Source: Group Whitening, Figure 2; its supplement, Figure 3.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from torch import Tensor
from tqdm import tqdm

from gw_detectron.analysis.feasibility import most_groups
from gw_detectron.analysis.outcome import Outcome, findings_of
from gw_detectron.layers import GroupWhitening2d

PERCENTS = (90, 80)
_LABELS = {"GN": "GN", "GW": "GW, exact", "GW-ItN": "GW, 5 iterations"}
_STYLES = {"GN": "s-", "GW": "o-", "GW-ItN": "^:"}
_SHOWN = {"features": "before ReLU", "moment": "about zero"}  # the reading in the picture
_EPS = 1e-5
# an eigenvalue below this part of the largest one is rounding: the normalisation has left no variance there
_ZERO = 1e-10


def analyze_conditioning(
    *,
    neurons: int = 256,
    examples: int = 1024,
    layers: Sequence[int] = (1, 2, 3, 4),
    repeats: int = 5,
    seed: int = 0,
    progress: bool = True,
) -> Outcome:
    """Redraws the conditioning of normalised activations.

    Args:
        neurons: d, of every layer.
        examples: m, Gaussian inputs of the network.
        layers: depths of the network.
        repeats: networks and inputs that are drawn anew; the median is shown.
        seed: of everything random.
        progress: show how far it is.

    Returns:
        One row for each depth, reading, method and number of groups.

    Raises:
        ValueError: a size is out of its range.
    """
    if neurons < 4 or examples <= neurons or repeats < 1 or not layers or min(layers) < 1:
        raise ValueError(
            f"needs 4 or more neurons, more examples than neurons, and 1 or more repeats and layers; got "
            f"neurons={neurons}, examples={examples}, repeats={repeats}, layers={list(layers)}"
        )
    generator = torch.Generator().manual_seed(seed)
    groups = [g for g in range(1, neurons // 2 + 1) if neurons % g == 0]
    found: dict[tuple, list[tuple[float, ...]]] = {}
    with tqdm(total=repeats * len(layers) * 2, desc="conditioning", disable=not progress) as bar:
        for _ in range(repeats):
            for depth in layers:
                for features, x in _activations(depth, neurons, examples, generator):
                    for (method, g), y in _normalised(x, groups):
                        for moment, matrix in _moments(y):
                            key = (depth, features, moment, method, g)
                            found.setdefault(key, []).append(condition_numbers(matrix))
                    bar.update()
    rows = [
        dict(zip(("layers", "features", "moment", "method", "groups"), key, strict=True)) | _medians(values)
        for key, values in found.items()
    ]
    settings = {"neurons": neurons, "examples": examples, "layers": list(layers), "repeats": repeats, "seed": seed}
    return Outcome("conditioning", settings, rows, _findings(rows, neurons), _draw(rows, settings))


def condition_numbers(moment: Tensor, percents: Iterable[int] = PERCENTS) -> tuple[float, ...]:
    r""":math:`\kappa_p` of a symmetric positive semi-definite matrix (d, d), for each p in percent; infinity if
    there is no variance in that many directions."""
    eigenvalues = torch.linalg.eigvalsh(moment).flip(0)
    places = [max(1, round(percent / 100 * len(eigenvalues))) - 1 for percent in percents]
    largest = float(eigenvalues[0])
    smallest = [float(eigenvalues[place]) for place in places]
    return tuple(largest / value if value > _ZERO * largest else float("inf") for value in smallest)


def _activations(depth: int, d: int, m: int, generator: torch.Generator) -> list[tuple[str, Tensor]]:
    """Gaussian inputs through a random MLP with torch's initialisation: its features before and after the last ReLU."""
    x = torch.randn(m, d, generator=generator, dtype=torch.float64)
    for _ in range(depth):
        layer = torch.empty(d, d + 1, dtype=torch.float64).uniform_(-(d**-0.5), d**-0.5, generator=generator)
        before = F.linear(x, layer[:, :d], layer[:, d])
        x = before.relu()
    return [("before ReLU", before), ("after ReLU", x)]


def _normalised(x: Tensor, groups: Iterable[int]) -> Iterable[tuple[tuple[str, int | None], Tensor]]:
    yield ("Base", None), x
    yield ("BN", None), F.batch_norm(x, None, None, training=True, eps=_EPS)
    for g in groups:
        yield ("GN", g), F.group_norm(x, g, eps=_EPS)
        if g <= most_groups(x.shape[1], whiten=True):
            for method, solver in (("GW", "zca"), ("GW-ItN", "newton")):
                yield (method, g), GroupWhitening2d(x.shape[1], g, eps=_EPS, affine=False, solver=solver)(x)


def _moments(x: Tensor) -> Iterable[tuple[str, Tensor]]:
    for name, centred in (("about the mean", x - x.mean(0)), ("about zero", x)):
        yield name, centred.T @ centred / len(x)


def _medians(values: list[tuple[float, ...]]) -> dict[str, float]:
    columns = torch.tensor(values, dtype=torch.float64).quantile(0.5, dim=0, interpolation="lower")
    return {f"kappa_{percent}%": float(f"{value:.6g}") for percent, value in zip(PERCENTS, columns, strict=True)}


def _select(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _findings(rows: Sequence[dict[str, Any]], neurons: int) -> dict[str, bool]:
    """The paper's observations, on the reading in the picture; one group, where GW is GN, is left out."""
    shown = _select(rows, **_SHOWN)
    better, growing, batch = [], [], []
    for depth in {row["layers"] for row in shown}:
        curves = {method: _select(shown, layers=depth, method=method) for method in ("BN", "GN", "GW")}
        for percent in PERCENTS:
            key = f"kappa_{percent}%"
            # beyond the square root the covariance of a sample is singular, see Table 1 and section 4.1
            gw = {row["groups"]: row[key] for row in curves["GW"] if row["groups"] ** 2 <= neurons}
            gn = {row["groups"]: row[key] for row in curves["GN"]}
            better += [gw[g] < gn[g] for g in gw if g > 1]
            growing += [curve[max(gw)] < curve[1] for curve in (gw, gn) if max(gw) > 1]
            if depth > 1:
                batch.append(curves["BN"][0][key] < min(*gw.values(), *(gn[g] for g in gw)))
    return findings_of(
        {
            "GW conditions better than GN, for every number of groups up to the square root of the neurons": better,
            "GW and GN condition better with more groups": growing,
            "from two layers on, BN conditions better than GN and GW": batch,
        }
    )


def _draw(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Figure:
    depths = settings["layers"]
    figure = Figure(figsize=(1.4 + 3.3 * len(depths), 6.6), layout="constrained")
    grid = figure.subplots(2, len(depths), squeeze=False, sharex=True)
    for column, depth in enumerate(depths):
        for axes, percent in zip(grid[:, column], PERCENTS, strict=True):
            _draw_curves(axes, _select(rows, layers=depth, **_SHOWN), f"kappa_{percent}%")
            axes.set_title(rf"$\kappa_{{{percent}\%}}$, {depth} layer{'s' * (depth > 1)}")
        grid[1, column].set_xlabel("groups g")
    for axes in grid[:, 0]:
        axes.set_ylabel("condition number")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(
        rf"Conditioning of normalised activations, X in $R^{{{settings['neurons']} \times {settings['examples']}}}$; "
        "a curve ends where it becomes infinite, GW where it is infeasible"
    )
    return figure


def _draw_curves(axes: Axes, rows: Sequence[dict[str, Any]], key: str) -> None:
    for method, colour, dashes in (("Base", "0.4", "--"), ("BN", "tab:purple", "-.")):
        value = _select(rows, method=method)[0][key]
        axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.4, label=method)
    for method, label in _LABELS.items():
        points = [row for row in _select(rows, method=method) if row[key] < float("inf")]
        places, values = [row["groups"] for row in points], [row[key] for row in points]
        axes.plot(places, values, _STYLES[method], markersize=4, linewidth=1.4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.grid(alpha=0.3)
