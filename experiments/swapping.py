r"""Show stochastic axis swapping: networks learn behind ZCA whitening, not behind PCA whitening.

PCA whitening :math:`\Lambda^{-1/2} D^T` orders the principal directions by their eigenvalues. When the order changes
from one step to the next, the next layer sees permuted inputs. ZCA whitening rotates back.

The figure has the paper's two parts: two batches in two dimensions that share the blue points, and the training loss of
MLPs with full-batch gradient descent. A third part shows the fraction of swapped neurons in the first layer. A neuron
is swapped if its output after a step is most similar to another neuron's output before it, on the same examples. The
data are not MNIST but random: every class is several Gaussian clouds, mixed by a random matrix.

Source: Decorrelated Batch Normalization, section 3.1, Definition 3.1, Figures 1 and 2.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from gw_detectron.errors import ConfigError
from gw_detectron.ops.solvers import Solver
from gw_detectron.workbench.console import progress_bar

from . import add_random_arguments
from .analysis_result import AnalysisResult

METHODS = {"plain": "no whitening", "pca": "PCA whitening", "zca": "ZCA whitening"}
RATES = (0.1, 0.5, 1.0, 5.0)
_COLORS = {"plain": "0.4", "pca": "tab:red", "zca": "tab:blue"}
_CLASSES = 10
_CLOUDS = 10  # per class

REDUCED = {"neurons": 40, "examples": 600, "steps": 100}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this experiment to its command."""
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[2, 4], help="layers of the MLPs"
    )
    parser.add_argument(
        "--neurons", type=int, default=100, help="of every hidden layer"
    )
    parser.add_argument(
        "--examples", type=int, default=2000, help="in the training set"
    )
    parser.add_argument("--steps", type=int, default=200, help="of gradient descent")
    parser.add_argument(
        "--batch-size", type=int, default=0, help="examples per step; 0: all"
    )
    add_random_arguments(parser, "40 neurons, 600 examples, 100 steps")


def analyze_swapping(
    *,
    depths: Sequence[int],
    neurons: int,
    examples: int,
    steps: int,
    batch_size: int,
    seed: int,
) -> AnalysisResult:
    """Train MLPs without whitening and with PCA or ZCA whitening of every hidden layer.

    As in the paper, each MLP is trained with the learning rates 0.1, 0.5, 1 and 5, and the run with the smallest final
    loss is shown.

    Args:
        depths: numbers of linear layers.
        neurons: of every hidden layer, and inputs.
        examples: in the training set.
        steps: of gradient descent.
        batch_size: random examples per step; 0 for all, as in the paper.
        seed: of everything random.

    Returns:
        One row per depth, method and step: loss and fraction of swapped neurons.

    Raises:
        ConfigError: a number is out of range.
    """
    if (
        min(depths, default=0) < 2
        or neurons < 2
        or steps < 2
        or examples < _CLASSES
        or not 0 <= batch_size <= examples
    ):
        raise ConfigError(
            f"depths={list(depths)}, neurons={neurons}, steps={steps}, examples={examples}, batch_size={batch_size}: "
            f"out of range. Fix: give 2 or more layers, neurons and steps, {_CLASSES} or more examples, and a batch of "
            "at most all examples."
        )
    x, y = _clouds(examples, neurons, seed)
    rows: list[dict[str, Any]] = []
    with progress_bar(
        total=len(depths) * len(METHODS) * len(RATES), desc="swapping", unit="run"
    ) as bar:
        for depth in depths:
            for method in METHODS:
                runs = []
                for rate in RATES:
                    network = WhitenedMLP([*[neurons] * depth, _CLASSES], method, seed)
                    runs.append(
                        (*train(network, x, y, rate, steps, batch_size, seed), rate)
                    )
                    bar.update()
                losses, swapped, rate = min(runs, key=lambda run: _last(run[0]))
                rows += [
                    {
                        "layers": depth,
                        "method": method,
                        "learning_rate": rate,
                        "step": step,
                        "loss": float(f"{loss:.5g}"),
                        "swapped": swap,
                    }
                    for step, (loss, swap) in enumerate(
                        zip(losses, swapped, strict=True)
                    )
                ]
    figure = _draw(rows, depths, batch_size, seed)
    return AnalysisResult("swapping", rows, _findings(rows, depths), figure)


class WhitenedMLP(nn.Module):
    """MLP with batch whitening between linear layer and ReLU of every hidden layer.

    Args:
        widths: of input, hidden layers and output.
        method: ``plain``, ``pca`` or ``zca``.
        seed: of the initial weights.
    """

    def __init__(self, widths: Sequence[int], method: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList()
        for inputs, outputs in itertools.pairwise(widths):
            layer = nn.Linear(inputs, outputs)
            for parameter in layer.parameters():  # torch's initialization with a seed
                nn.init.uniform_(
                    parameter, -(inputs**-0.5), inputs**-0.5, generator=generator
                )
            self.layers.append(layer)
        self.solver = Solver(method) if method != "plain" else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute class scores (N, classes) of inputs (N, d)."""
        for layer in self.layers[:-1]:
            x = self._whiten(layer(x)).relu()
        return self.layers[-1](x)

    @torch.no_grad()
    def first_layer(self, x: Tensor, batch: Tensor) -> Tensor:
        """Compute the first hidden layer (N, neurons) of inputs x, whitened by the statistics of ``batch``."""
        return self._whiten(self.layers[0](x), self.layers[0](batch))

    def _whiten(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        if self.solver is None:
            return x
        batch = x if batch is None else batch
        mean = batch.mean(0)
        centered = batch - mean
        return (x - mean) @ self.solver(centered.T @ centered / len(batch)).T


def train(
    network: WhitenedMLP,
    x: Tensor,
    y: Tensor,
    rate: float,
    steps: int,
    batch_size: int,
    seed: int,
) -> tuple[list[float], list[float | None]]:
    """Train by gradient descent until all steps are done or the loss is not finite.

    Returns:
        Per step, the cross-entropy loss before it, and the fraction of the first hidden layer's neurons that swapped
        since the previous step; None for the first step.
    """
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    swapped: list[float | None] = []
    before = None
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    for _ in range(steps):
        batch = (
            torch.randperm(len(x), generator=generator)[:batch_size]
            if batch_size
            else torch.arange(len(x))
        )
        loss = F.cross_entropy(network(x[batch]), y[batch])
        losses.append(float(loss.detach()))
        after = network.first_layer(x, x[batch])
        swapped.append(None if before is None else swapped_fraction(before, after))
        before = after
        if not torch.isfinite(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not all(
            torch.isfinite(parameter).all() for parameter in network.parameters()
        ):
            break
    return losses, swapped


def swapped_fraction(before: Tensor, after: Tensor) -> float:
    """Compute the fraction of neurons whose output is most similar to another neuron's previous output, up to sign.

    Args:
        before, after: outputs on the same examples, (N, neurons).
    """
    first, second = (F.normalize(x - x.mean(0), dim=0) for x in (before, after))
    closest = (first.T @ second).abs().argmax(0)
    return float((closest != torch.arange(len(closest))).double().mean())


def _clouds(examples: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw examples (N, d) of Gaussian clouds, mixed by a random matrix, and their classes (N,)."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(_CLASSES * _CLOUDS, inputs, generator=generator)
    cloud = torch.arange(examples) % len(centers)
    x = centers[cloud] + torch.randn(examples, inputs, generator=generator)
    return x @ torch.randn(
        inputs, inputs, generator=generator
    ) * inputs**-0.5, cloud % _CLASSES


def _last(losses: Sequence[float]) -> float:
    """Average the loss of the last five steps; infinity if training diverged."""
    last = losses[-5:]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def _findings(rows: Sequence[dict[str, Any]], depths: Sequence[int]) -> dict[str, bool]:
    def losses(depth: int, method: str) -> list[float]:
        return [
            row["loss"]
            for row in rows
            if (row["layers"], row["method"]) == (depth, method)
        ]

    def swaps(method: str) -> float:
        parts = [
            row["swapped"]
            for row in rows
            if row["method"] == method and row["swapped"] is not None
        ]
        return sum(parts) / len(parts)

    guessing = math.log(_CLASSES)
    return {
        "ZCA whitening: the loss falls below a tenth of that of guessing": all(
            _last(losses(depth, "zca")) < 0.1 * guessing for depth in depths
        ),
        "PCA whitening: the loss stays above half of that of guessing": all(
            _last(losses(depth, "pca")) > 0.5 * guessing for depth in depths
        ),
        "PCA whitening: the loss is higher than without whitening": all(
            _last(losses(depth, "pca")) > _last(losses(depth, "plain"))
            for depth in depths
        ),
        f"PCA whitening in {max(depths)} layers: the loss is that of guessing": (
            _last(losses(max(depths), "pca")) > 0.9 * guessing
        ),
        "per step, more than 10 % of the neurons swap with PCA whitening and less than 1 % with ZCA whitening": (
            swaps("pca") > 0.1 and swaps("zca") < 0.01
        ),
    }


def _draw(
    rows: Sequence[dict[str, Any]], depths: Sequence[int], batch_size: int, seed: int
) -> Figure:
    figure = Figure(figsize=(13, 7.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(0.62, 1), squeeze=False)[:, 0]
    _draw_two_batches(above, seed)
    axes = below.subplots(1, len(depths) + 1)
    for panel, depth in zip(axes, depths, strict=False):
        for method, label in METHODS.items():
            chosen = [
                row for row in rows if (row["layers"], row["method"]) == (depth, method)
            ]
            label = f"{label}, rate {chosen[0]['learning_rate']:g}"
            steps, losses = (
                [row["step"] for row in chosen],
                [row["loss"] for row in chosen],
            )
            panel.plot(steps, losses, color=_COLORS[method], linewidth=1.6, label=label)
        panel.axhline(math.log(_CLASSES), color="0.7", linestyle=":", label="guessing")
        panel.set(
            title=f"{depth}-layer MLP",
            xlabel="step",
            ylabel="training loss",
            yscale="log",
        )
    for method, label in reversed(METHODS.items()):
        chosen = [
            row
            for row in rows
            if (row["layers"], row["method"]) == (max(depths), method)
        ]
        points = [
            (row["step"], row["swapped"])
            for row in chosen
            if row["swapped"] is not None
        ]
        dashes = "--" if method == "plain" else "-"  # ZCA's curve, also 0, covers it
        axes[-1].plot(
            *zip(*points, strict=True),
            dashes,
            color=_COLORS[method],
            linewidth=1.2,
            label=label,
        )
    axes[-1].set(
        title=f"{max(depths)}-layer MLP, first hidden layer",
        xlabel="step",
        ylabel="fraction of swapped neurons",
        ylim=(-0.03, 1),
    )
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    batch = f"batches of {batch_size}" if batch_size else "full batch"
    below.suptitle(
        f"Gradient descent, {batch}, best of the learning rates {', '.join(f'{r:g}' for r in RATES)}"
    )
    return figure


def _draw_two_batches(figure: Any, seed: int) -> None:
    """Draw two batches that share the blue points, plain and whitened; the red points swap the order of the axes."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.tensor(
        [[math.cos(0.6), math.sin(0.6)], [-math.sin(0.6), math.cos(0.6)]]
    )
    leg = torch.linspace(0, 1, 16)
    # an L shape, which shows which axis is which
    shared = torch.cat(
        (
            torch.stack((3 * leg - 1, 0 * leg - 0.7), 1),
            torch.stack((0 * leg - 1, 1.4 * leg - 0.7), 1),
        )
    )
    axes = figure.subplots(1, 6)
    for column, spread in enumerate(((2.4, 0.5), (0.5, 2.4))):
        other = torch.randn(48, 2, generator=generator)
        other = (other - other.mean(0)) * torch.tensor(spread)
        batch = torch.cat((shared, other)) @ turn
        centered = batch - batch.mean(0)
        covariance = centered.T @ centered / len(batch)
        _draw_points(axes[column], f"batch {column + 1}", centered, len(shared), 5.5)
        vectors = torch.linalg.eigh(covariance).eigenvectors
        for order, place in enumerate((1, 0), start=1):
            direction = vectors[:, place] * vectors[0, place].sign()
            axes[column].annotate(
                "",
                3.6 * direction,
                (0, 0),
                arrowprops={"arrowstyle": "->", "linewidth": 1.6},
            )
            axes[column].annotate(
                f"$d_{order}$", 4.4 * direction, ha="center", va="center", fontsize=12
            )
        for place, name in ((2, "pca"), (4, "zca")):
            whitened = centered @ Solver(name)(covariance).T
            _draw_points(
                axes[place + column],
                f"{name.upper()}, batch {column + 1}",
                whitened,
                len(shared),
                3.2,
            )
    figure.suptitle(
        "Two batches that share the blue points: PCA whitening swaps their axes, ZCA whitening does not"
    )


def _draw_points(
    axes: Axes, title: str, points: Tensor, shared: int, limit: float
) -> None:
    axes.plot(*points[shared:].T, "o", markersize=3, color="tab:red", alpha=0.4)
    axes.plot(*points[:shared].T, "o", markersize=3.4, color="tab:blue")
    axes.set(title=title, aspect="equal", xlim=(-limit, limit), ylim=(-limit, limit))
    axes.grid(alpha=0.3)
