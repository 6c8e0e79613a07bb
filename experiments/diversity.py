r"""Measure the diversity of normalized features over group width (GN) and batch size (BN).

Two dimensions of the features, divided by their largest magnitude, lie in :math:`V = [-1, 1]^2`, which is divided into
:math:`T^2` bins. The diversity is the entropy in nats

.. math:: \Gamma_{2,T}(\mathbb{D}) = -\sum_{i=1}^{T^2} p_i \log p_i

with :math:`p_i` the fraction of examples in bin i, averaged over sampled pairs of dimensions. (Eq. 13 is printed
without the sign; a constant feature has diversity 0.) GN's pairs come from one group, because its constraints act
within a group; BN's pairs are any two dimensions.

Dividing each feature by its own largest magnitude favors bounded features: a Gaussian normalized over 4 numbers is
uniform on an interval and fills it, while a plain Gaussian leaves most of V empty. "one scale" therefore divides all
features (the base's scaled to variance 1) by the base's largest magnitude. Both are drawn.

Source: Group Whitening, section 4.1, Eq. 13, Figures 3 and 4.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from gw_detectron.errors import ConfigError
from gw_detectron.progress import progress_bar

from . import add_random_arguments
from .analysis_result import AnalysisResult, findings_of

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
_SOURCES = {"gaussian": "Gaussian", "mlp": "one-layer MLP"}
_SCALES = {"own": "each divided by its own maximum", "one": "variance 1, one scale for all"}
_HISTOGRAM_SIZES = (2, 3, 4, 8, 32)
# tiny, so that values over two channels are -1 and 1
_EPS = 1e-12

REDUCED = {"examples": 96_000, "bins": 200}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this experiment to its command."""
    parser.add_argument("--examples", type=int, default=1_680_000, help="N")
    parser.add_argument("--bins", type=int, default=1000, help="T, along each of two dimensions")
    parser.add_argument("--pairs", type=int, default=4, help="sampled pairs of dimensions")
    add_random_arguments(parser, "96,000 examples, 200 bins")


def analyze_diversity(
    *,
    examples: int = 1_680_000,
    bins: int = 1000,
    sizes: Sequence[int] = SIZES,
    pairs: int = 4,
    histogram_examples: int = 1680,
    seed: int = 0,
) -> AnalysisResult:
    """Redraw the histograms and the diversity of normalized features.

    Args:
        examples: N, the number of Gaussian vectors; the largest of ``sizes`` is their dimension.
        bins: T, along each of the two dimensions.
        sizes: channels per group, and batch sizes; each must divide the largest.
        pairs: sampled pairs of dimensions to average over.
        histogram_examples: examples in the histograms.
        seed: of everything random.

    Returns:
        One row per source, method and size: the diversity in both scales.

    Raises:
        ConfigError: a number is out of range, or a size does not divide the largest one.
    """
    neurons = max(sizes, default=0)
    wrong = [size for size in sizes if size < 2 or neurons % size]
    if not sizes or wrong:
        raise ConfigError(f"sizes={list(sizes)}: {wrong} are below 2 or do not divide the largest. Fix: give divisors.")
    if bins < 2 or pairs < 1 or min(examples, histogram_examples) < neurons:
        raise ConfigError(
            f"bins={bins}, pairs={pairs}, examples={examples}, histogram_examples={histogram_examples}: out of range. "
            f"Fix: give 2 or more bins, 1 or more pairs, and at least {neurons} examples."
        )
    rows: list[dict[str, Any]] = []
    with progress_bar(total=len(_SOURCES) * (1 + 2 * len(sizes)), desc="diversity", unit="run") as bar:
        for source in _SOURCES:
            x = _features(source, examples, neurons, seed)
            limit = (_largest(x) / _deviation(x)).max()
            picker = torch.Generator().manual_seed(seed)
            for method, size in [("Base", None), *((method, size) for method in ("GN", "BN") for size in sizes)]:
                own, one = [], []
                for _ in range(pairs):
                    y = normalized_pair(x, method, size, picker)
                    own.append(entropy(y / _largest(y), bins))
                    one.append(entropy(y / (_deviation(y) if method == "Base" else 1) / limit, bins))
                rows.append(
                    {
                        "source": source,
                        "method": method,
                        "size": size,
                        "diversity_own": round(sum(own) / pairs, 4),
                        "diversity_one": round(sum(one) / pairs, 4),
                    }
                )
                bar.update()
    settings = {
        "examples": examples,
        "bins": bins,
        "sizes": list(sizes),
        "pairs": pairs,
        "histogram_examples": histogram_examples,
        "seed": seed,
    }
    return AnalysisResult("diversity", settings, rows, _findings(rows), _draw(rows, settings))


def entropy(points: Tensor, bins: int) -> float:
    """Compute the diversity Gamma, in nats, of points (N, 2) in [-1, 1]^2 with ``bins`` x ``bins`` bins."""
    places = ((points + 1) * (bins / 2)).long().clamp(0, bins - 1)
    counts = torch.bincount(places[:, 0] * bins + places[:, 1])
    p = counts[counts > 0].double() / len(points)
    return float(-(p * p.log()).sum())


def normalized_pair(x: Tensor, method: str, size: int | None, generator: torch.Generator) -> Tensor:
    """Return two random dimensions of normalized features.

    Args:
        x: features, (N, d).
        method: ``Base`` does not normalize; ``GN`` has ``size`` channels per group and takes both dimensions from one
            group; ``BN`` has ``size`` examples per batch.
        size: None for ``Base``; for BN, N is cut to a multiple of it.
        generator: picks the dimensions.

    Returns:
        (N, 2), each dimension with variance 1 over its group or batch.
    """
    count, neurons = x.shape
    width = size if method == "GN" and size else neurons
    start = width * int(torch.randint(neurons // width, (), generator=generator))
    pair = start + torch.randperm(width, generator=generator)[:2]
    if method == "GN":
        group = x[:, start : start + width]
        return (x[:, pair] - group.mean(1, keepdim=True)) / (group.var(1, unbiased=False, keepdim=True) + _EPS).sqrt()
    if method == "BN" and size:
        batches = x[: count // size * size, pair].unflatten(0, (-1, size))
        centered = batches - batches.mean(1, keepdim=True)
        return (centered / (batches.var(1, unbiased=False, keepdim=True) + _EPS).sqrt()).flatten(0, 1)
    return x[:, pair]


def _features(source: str, examples: int, neurons: int, seed: int) -> Tensor:
    """Draw Gaussian vectors (N, d), or pass them through a random linear layer and a ReLU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, neurons, generator=generator)
    if source == "gaussian":
        return x
    bound = neurons**-0.5
    weight = torch.empty(neurons, neurons).uniform_(-bound, bound, generator=generator)
    bias = torch.empty(neurons).uniform_(-bound, bound, generator=generator)
    return torch.addmm(bias, x, weight.T).relu_()


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(0).clamp_min(_EPS)


def _deviation(x: Tensor) -> Tensor:
    return x.var(0, unbiased=False).sqrt().clamp_min(_EPS)


def _curve(rows: Sequence[dict[str, Any]], source: str, method: str, scale: str) -> dict[Any, float]:
    return {
        row["size"]: row[f"diversity_{scale}"] for row in rows if (row["source"], row["method"]) == (source, method)
    }


def _findings(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    findings = {}
    # two numbers become -1 and 1, or both 0 if equal: a pair of dimensions has this many points
    for method, numbers, points in (("GN", "channels per group", 3), ("BN", "examples per batch", 9)):
        curves = [_curve(rows, source, method, scale) for source in _SOURCES for scale in _SCALES]
        bases = [_curve(rows, source, "Base", scale)[None] for source in _SOURCES for scale in _SCALES]
        findings[f"{method}: over 2 {numbers} the diversity collapses to that of {points} points or fewer"] = [
            curve[2] < min(base, math.log(points)) for curve, base in zip(curves, bases, strict=True) if 2 in curve
        ]
        findings[f"{method}: up to 4 {numbers}, diversity grows with their number"] = [
            curve[few] < curve[more] for curve in curves for few in curve for more in curve if few < more <= 4
        ]
        findings[f"{method}: Gaussians on one scale, over 4 {numbers} or fewer, are less diverse than the base"] = [
            value < bases[1] for size, value in curves[1].items() if size <= 4
        ]
    return findings_of(findings)


def _draw(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 11.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.0, 1.15), squeeze=False)[:, 0]
    _draw_histograms(above, settings)
    grid = below.subplots(2, 2, sharex=True, sharey="row")
    for row, (scale, scale_label) in zip(grid, _SCALES.items(), strict=True):
        for axes, (source, source_label) in zip(row, _SOURCES.items(), strict=True):
            base = _curve(rows, source, "Base", scale)[None]
            axes.axhline(base, color="0.4", linestyle="--", linewidth=1.4, label="Base")
            for method, style, label in (("GN", "s-", "GN, over channels"), ("BN", "o-", "BN, over the batch")):
                curve = _curve(rows, source, method, scale)
                axes.plot(list(curve), list(curve.values()), style, markersize=4, linewidth=1.4, label=label)
            axes.set_title(f"{source_label}; {scale_label}", fontsize=11)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_ylim(0, None)
            axes.grid(alpha=0.3)
        row[0].set_ylabel(r"diversity $\Gamma_{2,T}$ (nats)")
    for axes in grid[-1]:
        axes.set_xlabel("channels per group c (GN), examples per batch m (BN)")
    grid[0, 0].legend(loc="lower right")
    below.suptitle(f"Diversity of N = {settings['examples']:,} examples in {settings['bins']:,}$^2$ bins")
    return figure


def _draw_histograms(figure: Any, settings: dict[str, Any]) -> None:
    sizes = [size for size in _HISTOGRAM_SIZES if size in settings["sizes"]] or settings["sizes"][:5]
    x = _features("gaussian", settings["histogram_examples"], max(settings["sizes"]), settings["seed"])
    grid = figure.subplots(2, len(sizes), squeeze=False)
    for row, (method, letter) in zip(grid, (("GN", "c"), ("BN", "m")), strict=True):
        for axes, size in zip(row, sizes, strict=True):
            generator = torch.Generator().manual_seed(settings["seed"])
            first, second = normalized_pair(x, method, size, generator).T
            limits = (-3.2, 3.2)
            axes.hexbin(first, second, gridsize=32, extent=limits * 2, mincnt=1, cmap="viridis", linewidths=0.1)
            axes.set(xlim=limits, ylim=limits, aspect="equal", xticks=(-2, 0, 2), yticks=(-2, 0, 2))
            axes.set_xlabel(f"{method}, {letter} = {size}")
            for place, values, orientation in (
                ((0, 1.03, 1, 0.22), first, "vertical"),
                ((1.03, 0, 0.22, 1), second, "horizontal"),
            ):
                margin = axes.inset_axes(place)
                margin.hist(values, bins=48, range=limits, orientation=orientation, color="tab:blue")
                margin.axis("off")
    figure.suptitle(
        f"Two dimensions of {settings['histogram_examples']:,} normalized Gaussian examples, with their marginals"
    )
