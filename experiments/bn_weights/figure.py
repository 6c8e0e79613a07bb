"""Draw AP on changed photos, and what the changes do to a photo: part 1 of PLAN.md.

python -m experiments.bn_weights.figure OUTPUT.png PHOTO RESULTS.csv ...
"""

import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes

from gw_detectron.atomic import atomic_write
from gw_detectron.workbench.images import read_image

from .table import CLEAN, rows_of
from .without_training import ARMS, CHANGES

STYLES: dict[str, dict[str, Any]] = {
    "BN": {"color": "black"},
    "mean 0.3": {"color": "#e69f00"},
    "MixBN 0.5": {"color": "#0072b2"},
    "MixBN 0.3": {"color": "#0072b2", "linestyle": ":"},
    "MixGW 0.1": {"color": "#d55e00"},
    "MixGW 0.3": {"color": "#d55e00", "linestyle": ":"},
}


def draw(photo: str, files: list[str]) -> pyplot.Figure:
    """Draw a column for each change: the photo at its greatest strength, and the mean AP of each arm."""
    rows = rows_of(*files)
    changes = [name for name in CHANGES if name != CLEAN]
    figure, grid = pyplot.subplots(
        2,
        len(changes),
        figsize=(2.4 * len(changes), 4.6),
        height_ratios=(1, 1.5),
        layout="constrained",
    )
    pixels = torch.from_numpy(read_image(photo, "RGB").copy()).permute(2, 0, 1) / 255
    for change, (picture, axes) in zip(changes, grid.T, strict=True):
        apply, strengths = CHANGES[change]
        changed = apply(pixels, strengths[-1]).clamp(0, 1)
        picture.imshow(changed.permute(1, 2, 0))
        picture.set_title(f"{change} {strengths[-1]:g}", fontsize=10)
        picture.axis("off")
        _draw_lines(axes, rows, change, strengths)

    first = grid[1, 0]
    for axes in grid[1, 1:]:
        axes.sharey(first)
        axes.tick_params(labelleft=False)
    first.set(ylabel="box AP", ylim=(0, None))
    first.legend(fontsize=7, frameon=False, loc="lower left")
    return figure


def _draw_lines(
    axes: Axes, rows: list[dict], change: str, strengths: tuple[float, ...]
) -> None:
    labels = ["clean", *(f"{strength:g}" for strength in strengths)]
    places = [(CLEAN, 0.0), *((change, strength) for strength in strengths)]
    for arm in ARMS:
        means = []
        for name, strength in places:
            aps = [
                row["AP"]
                for row in rows
                if (row["arm"], row["change"], row["strength"]) == (arm, name, strength)
            ]
            means.append(mean(aps))
        axes.plot(labels, means, marker="o", markersize=3, label=arm, **STYLES[arm])
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


if __name__ == "__main__":
    with atomic_write(Path(sys.argv[1])) as temporary:
        draw(sys.argv[2], sys.argv[3:]).savefig(temporary, format="png", dpi=110)
