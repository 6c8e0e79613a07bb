r"""Stochastic axis swapping: why a network learns behind ZCA whitening and not behind PCA whitening.

PCA whitening :math:`\Lambda^{-1/2} D^T` gives each principal direction a place by the order of the eigenvalues. From
one step to the next the order changes, and the layer above sees its inputs permuted; ZCA whitening rotates back.

The picture has the paper's two: two batches in two dimensions that share the blue points, and the training loss of
MLPs by full batch gradient descent. To them it adds what happens on the way: the part of the first layer's neurons that
swap, that is whose output is after a step most like that of another neuron before it, for the same examples. The
data are not MNIST but drawn: every class is several Gaussian clouds, pressed together by a random matrix.

Source: Decorrelated Batch Normalization, section 3.1, Definition 3.1, Figures 1 and 2.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from gw_detectron.analysis.outcome import Outcome
from gw_detectron.ops.solvers import Solver

METHODS = {"plain": "no whitening", "pca": "PCA whitening", "zca": "ZCA whitening"}
RATES = (0.1, 0.5, 1.0, 5.0)
_COLOURS = {"plain": "0.4", "pca": "tab:red", "zca": "tab:blue"}
_CLASSES = 10
_CLOUDS = 10  # of every class


def analyze_swapping(
    *,
    depths: Sequence[int] = (2, 4),
    neurons: int = 100,
    examples: int = 2000,
    steps: int = 200,
    batch_size: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> Outcome:
    """Trains MLPs without whitening, with PCA and with ZCA whitening of every hidden layer.

    Each is trained with the learning rates 0.1, 0.5, 1 and 5, and the one with the least loss at the end is shown, as
    in the paper.

    Args:
        depths: numbers of linear layers.
        neurons: of every hidden layer, and inputs.
        examples: in the training set.
        steps: of gradient descent.
        batch_size: examples of a step, drawn anew each time; 0 for all, as in the paper.
        seed: of everything random.
        progress: show how far it is.

    Returns:
        One row for each depth, method and step: loss and part of the neurons that swapped.

    Raises:
        ValueError: a number is out of its range.
    """
    if min(depths, default=0) < 2 or neurons < 2 or steps < 2 or examples < _CLASSES or not 0 <= batch_size <= examples:
        raise ValueError(
            f"needs 2 or more layers, neurons and steps, {_CLASSES} or more examples, and a batch no larger than them; "
            f"got depths={list(depths)}, neurons={neurons}, steps={steps}, examples={examples}, batch_size={batch_size}"
        )
    x, y = _clouds(examples, neurons, seed)
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(depths) * len(METHODS) * len(RATES), desc="swapping", disable=not progress) as bar:
        for depth in depths:
            for method in METHODS:
                runs = []
                for rate in RATES:
                    network = WhitenedMLP([*[neurons] * depth, _CLASSES], method, seed)
                    runs.append((*train(network, x, y, rate, steps, batch_size, seed), rate))
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
                    for step, (loss, swap) in enumerate(zip(losses, swapped, strict=True))
                ]
    settings = {
        "depths": list(depths),
        "neurons": neurons,
        "examples": examples,
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
    }
    return Outcome("swapping", settings, rows, _findings(rows, depths), _draw(rows, settings))


class WhitenedMLP(nn.Module):
    """An MLP that whitens its hidden layers between the linear map and the ReLU, over the batch.

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
            for parameter in layer.parameters():  # torch's initialisation, from a seed of its own
                nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
            self.layers.append(layer)
        self.solver = Solver(method) if method != "plain" else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns class scores (N, classes) of inputs (N, d)."""
        for layer in self.layers[:-1]:
            x = self._whiten(layer(x)).relu()
        return self.layers[-1](x)

    @torch.no_grad()
    def first_layer(self, x: Tensor, batch: Tensor) -> Tensor:
        """Returns the first hidden layer (N, neurons) of inputs x, whitened as in a step with the inputs ``batch``."""
        return self._whiten(self.layers[0](x), self.layers[0](batch))

    def _whiten(self, x: Tensor, batch: Tensor | None = None) -> Tensor:
        if self.solver is None:
            return x
        batch = x if batch is None else batch
        mean = batch.mean(0)
        centred = batch - mean
        return (x - mean) @ self.solver(centred.T @ centred / len(batch)).T


def train(
    network: WhitenedMLP, x: Tensor, y: Tensor, rate: float, steps: int, batch_size: int, seed: int
) -> tuple[list[float], list[float | None]]:
    """Trains by gradient descent until it has made its steps, or its loss is no longer finite.

    Returns:
        For every step the cross-entropy loss before it, and the part of the first hidden layer's neurons that have
        swapped since the step before; None for the first one.
    """
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    swapped: list[float | None] = []
    before = None
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    for _ in range(steps):
        batch = torch.randperm(len(x), generator=generator)[:batch_size] if batch_size else torch.arange(len(x))
        loss = F.cross_entropy(network(x[batch]), y[batch])
        losses.append(float(loss.detach()))
        after = network.first_layer(x, x[batch])
        swapped.append(None if before is None else swapped_part(before, after))
        before = after
        if not torch.isfinite(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not all(torch.isfinite(parameter).all() for parameter in network.parameters()):
            break
    return losses, swapped


def swapped_part(before: Tensor, after: Tensor) -> float:
    """The part of the neurons whose output is most like that of another neuron before, up to the sign.

    Args:
        before, after: outputs for the same examples, (N, neurons).
    """
    first, second = (F.normalize(x - x.mean(0), dim=0) for x in (before, after))
    closest = (first.T @ second).abs().argmax(0)
    return float((closest != torch.arange(len(closest))).double().mean())


def _clouds(examples: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Examples (N, d) of Gaussian clouds, correlated by a random matrix, and their classes (N,)."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(_CLASSES * _CLOUDS, inputs, generator=generator)
    cloud = torch.arange(examples) % len(centres)
    x = centres[cloud] + torch.randn(examples, inputs, generator=generator)
    return x @ torch.randn(inputs, inputs, generator=generator) * inputs**-0.5, cloud % _CLASSES


def _last(losses: Sequence[float]) -> float:
    """The loss at the end, of the last steps; infinity if training has diverged."""
    last = losses[-5:]
    mean = sum(last) / len(last)
    return mean if math.isfinite(mean) else math.inf


def _findings(rows: Sequence[dict[str, Any]], depths: Sequence[int]) -> dict[str, bool]:
    def losses(depth: int, method: str) -> list[float]:
        return [row["loss"] for row in rows if (row["layers"], row["method"]) == (depth, method)]

    def swaps(method: str) -> float:
        parts = [row["swapped"] for row in rows if row["method"] == method and row["swapped"] is not None]
        return sum(parts) / len(parts)

    guessing = math.log(_CLASSES)
    return {
        "the loss behind ZCA whitening falls to less than a tenth of guessing": all(
            _last(losses(depth, "zca")) < 0.1 * guessing for depth in depths
        ),
        "behind PCA whitening it stays above half of guessing": all(
            _last(losses(depth, "pca")) > 0.5 * guessing for depth in depths
        ),
        "that is worse than without whitening": all(
            _last(losses(depth, "pca")) > _last(losses(depth, "plain")) for depth in depths
        ),
        f"in {max(depths)} layers behind PCA whitening it is that of guessing": (
            _last(losses(max(depths), "pca")) > 0.9 * guessing
        ),
        "at a step more than a tenth of the neurons swap under PCA, less than a hundredth under ZCA": (
            swaps("pca") > 0.1 and swaps("zca") < 0.01
        ),
    }


def _draw(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 7.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(0.62, 1), squeeze=False)[:, 0]
    _draw_two_batches(above, settings["seed"])
    axes = below.subplots(1, len(settings["depths"]) + 1)
    for panel, depth in zip(axes, settings["depths"], strict=False):
        for method, label in METHODS.items():
            chosen = [row for row in rows if (row["layers"], row["method"]) == (depth, method)]
            label = f"{label}, rate {chosen[0]['learning_rate']:g}"
            steps, losses = [row["step"] for row in chosen], [row["loss"] for row in chosen]
            panel.plot(steps, losses, color=_COLOURS[method], linewidth=1.6, label=label)
        panel.axhline(math.log(_CLASSES), color="0.7", linestyle=":", label="guessing")
        panel.set(title=f"{depth}-layer MLP", xlabel="step", ylabel="training loss", yscale="log")
    for method, label in reversed(METHODS.items()):
        chosen = [row for row in rows if (row["layers"], row["method"]) == (max(settings["depths"]), method)]
        points = [(row["step"], row["swapped"]) for row in chosen if row["swapped"] is not None]
        dashes = "--" if method == "plain" else "-"  # it lies below that of ZCA, at 0
        axes[-1].plot(*zip(*points, strict=True), dashes, color=_COLOURS[method], linewidth=1.2, label=label)
    axes[-1].set(
        title=f"{max(settings['depths'])}-layer MLP, first hidden layer",
        xlabel="step",
        ylabel="part of the neurons that swap",
        ylim=(-0.03, 1),
    )
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    batch = f"batches of {settings['batch_size']}" if settings["batch_size"] else "full batch"
    below.suptitle(f"Gradient descent, {batch}, best of the learning rates {', '.join(f'{r:g}' for r in RATES)}")
    return figure


def _draw_two_batches(figure: Any, seed: int) -> None:
    """Two batches that share the blue points, as they are and whitened: the red ones turn the order of the axes."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.tensor([[math.cos(0.6), math.sin(0.6)], [-math.sin(0.6), math.cos(0.6)]])
    leg = torch.linspace(0, 1, 16)
    # an L, by which the axes can be told apart
    shared = torch.cat((torch.stack((3 * leg - 1, 0 * leg - 0.7), 1), torch.stack((0 * leg - 1, 1.4 * leg - 0.7), 1)))
    axes = figure.subplots(1, 6)
    for column, spread in enumerate(((2.4, 0.5), (0.5, 2.4))):
        other = torch.randn(48, 2, generator=generator)
        other = (other - other.mean(0)) * torch.tensor(spread)
        batch = torch.cat((shared, other)) @ turn
        centred = batch - batch.mean(0)
        covariance = centred.T @ centred / len(batch)
        _draw_points(axes[column], f"batch {column + 1}", centred, len(shared), 5.5)
        vectors = torch.linalg.eigh(covariance).eigenvectors
        for order, place in enumerate((1, 0), start=1):
            direction = vectors[:, place] * vectors[0, place].sign()
            axes[column].annotate("", 3.6 * direction, (0, 0), arrowprops={"arrowstyle": "->", "linewidth": 1.6})
            axes[column].annotate(f"$d_{order}$", 4.4 * direction, ha="center", va="center", fontsize=12)
        for place, name in ((2, "pca"), (4, "zca")):
            whitened = centred @ Solver(name)(covariance).T
            _draw_points(axes[place + column], f"{name.upper()}, batch {column + 1}", whitened, len(shared), 3.2)
    figure.suptitle(
        "Two batches that share the blue points: the axes that PCA whitening gives them swap, those of ZCA stay"
    )


def _draw_points(axes: Axes, title: str, points: Tensor, shared: int, limit: float) -> None:
    axes.plot(*points[shared:].T, "o", markersize=3, color="tab:red", alpha=0.4)
    axes.plot(*points[:shared].T, "o", markersize=3.4, color="tab:blue")
    axes.set(title=title, aspect="equal", xlim=(-limit, limit), ylim=(-limit, limit))
    axes.grid(alpha=0.3)
