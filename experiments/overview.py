"""Draw the picture of README.md: what Group Whitening does, and what a small detector gains.

python -m experiments.overview docs/overview.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from torch import Tensor, nn

from examples.shapes import draw_images
from gw_detectron import GroupWhitening2d
from gw_detectron.atomic import atomic_write

from .small_batch import RESULTS, scored

GROUPS = 16
COLORS = {"BN": "#9e9e9e", "GN": "#6fa8dc", "GW": "#3f51b5"}


def features() -> Tensor:
    """Compute feature maps of an image by two random convolutions."""
    torch.manual_seed(0)
    pixels = torch.frombuffer(
        bytearray(draw_images(1)[0].convert("RGB").resize((128, 128)).tobytes()),
        dtype=torch.uint8,
    )
    x = pixels.reshape(1, 128, 128, 3).permute(0, 3, 1, 2) / 255
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.ReLU(), nn.Conv2d(64, 64, 3))(
        x
    ).detach()


def correlation(x: Tensor) -> Tensor:
    """Compute the correlation between the groups of channels of a sample."""
    return torch.corrcoef(x[0].reshape(GROUPS, -1))


def draw(results: Path) -> pyplot.Figure:
    """Draw correlations before and after GN and GW, and box AP by images per batch."""
    figure = pyplot.figure(figsize=(11, 3), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.35, 1])
    x = features()
    layers = {
        "features": nn.Identity(),
        "after GroupNorm": nn.GroupNorm(GROUPS, 64),
        "after Group Whitening": GroupWhitening2d(64, GROUPS),
    }
    for axis, (title, layer) in zip(left.subplots(1, 3), layers.items(), strict=True):
        image = axis.imshow(
            correlation(layer(x).detach()).abs(), vmin=0, vmax=1, cmap="Blues"
        )
        axis.set(title=title, xticks=[], yticks=[])
    left.colorbar(image, ax=left.axes, shrink=0.7)
    left.suptitle("Correlation between 16 groups of channels of one image")
    axis = right.subplots()
    for place, (norm, color) in enumerate(COLORS.items()):
        for index, batch in enumerate((1, 2, 4, 8)):
            values = scored(norm, batch, results).values()
            bar = axis.bar(
                index + 0.27 * (place - 1), sum(values) / len(values), 0.25, color=color
            )
            axis.bar_label(bar, fmt="%.0f", fontsize=8)
        axis.bar(0, 0, color=color, label=norm)
    axis.set(
        xticks=range(4),
        xticklabels=["1 image", "2", "4", "8 per batch"],
        ylabel="box AP",
        yticks=[],
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(frameon=False, ncols=3, loc="upper right")
    right.suptitle("A small detector after 4,000 images")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    with atomic_write(args.output) as temporary:
        draw(args.results).savefig(temporary, format="png", dpi=110)
