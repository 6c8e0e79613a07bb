r"""Measure what the padding of a batch changes in a detector whose norms see single samples.

Images of a batch are padded with zeros to one size. Norms of each sample include this area in their statistics, so an
image has other features in a batch than alone. The difference of a level is
:math:`\lVert f_N - f_1 \rVert / \lVert f_1 \rVert` over the area of the image, averaged over images, where
:math:`f_N` are its features in a batch of N.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from gw_detectron.errors import ConfigError
from gw_detectron.workbench.console import progress_bar

from . import add_reduced, trained_detector
from .analysis_result import AnalysisResult, findings_of
from .trained_detector import box_ap, detect, load_detector

Input = dict[str, Any]  # of a detector: a record with an "image"

MOST = 1.0  # AP
REDUCED = {"batches": [1, 2], "images": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this experiment to its command."""
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="images per batch",
    )
    trained_detector.add_arguments(parser)
    add_reduced(parser, "1 and 2 images per batch, 4 images")


def analyze_padding(
    *,
    config_file: str,
    weights: str,
    batches: Sequence[int],
    images: int,
) -> AnalysisResult:
    """Compare features and box AP of images in batches and alone.

    Args:
        config_file, weights, images: the trained detector, see :func:`experiments.trained_detector.load_detector`.
        batches: numbers of images per batch; images stay in the order of the dataset.

    Returns:
        One row per batch size: share of padding, difference of each level, AP.

    Raises:
        ConfigError: a batch size is not positive.
        Other errors: see :func:`experiments.trained_detector.load_detector`.
    """
    if not batches or min(batches) < 1:
        raise ConfigError(
            f"batches ({list(batches)}): expected positive numbers. Fix: give 1 or more."
        )
    model, inputs, evaluator = load_detector(config_file, weights, images)
    rows: list[dict[str, Any]] = []
    for batch in progress_bar(batches, desc="batches", unit="size"):
        shares, detections = [], []
        differences: list[dict[str, float]] = []
        for start in range(0, len(inputs), batch):
            group = inputs[start : start + batch]
            detections += detect(model, group)
            shares.append(_padding(model, group))
            differences += _differences(model, group)
        levels = {
            name: statistics.mean(each[name] for each in differences)
            for name in differences[0]
        }
        rows.append(
            {"batch": batch, "padding": round(statistics.mean(shares), 3)}
            | {name: round(value, 4) for name, value in levels.items()}
            | {"AP": round(box_ap(evaluator, inputs, detections), 2)}
        )
    aps = [row["AP"] for row in rows]
    findings = findings_of(
        {
            f"AP changes by less than {MOST:g} with the batch": [
                max(aps) - min(aps) < MOST
            ]
        }
    )
    settings = {"images": len(inputs)}
    return AnalysisResult("padding", rows, findings, _draw(rows), settings)


def _padding(model: Any, group: Sequence[Input]) -> float:
    """Return the share of padding in a batch."""
    padded = model.preprocess_image(group).tensor
    pixels = sum(each["image"][0].numel() for each in group)
    return 1 - pixels / padded[:, 0].numel()


@torch.no_grad()
def _features(model: Any, group: Sequence[Input]) -> Iterator[dict[str, Tensor]]:
    """Yield the features of each image of a batch, over its own area."""
    images = model.preprocess_image(group)
    maps = model.backbone(images.tensor)
    for index, (height, width) in enumerate(images.image_sizes):
        yield {
            name: maps[name][
                index, :, : -(-height // shape.stride), : -(-width // shape.stride)
            ]
            for name, shape in model.backbone.output_shape().items()
        }


def _differences(
    model: nn.Module, group: Sequence[Input]
) -> Iterator[dict[str, float]]:
    for single, together in zip(group, _features(model, group), strict=True):
        (alone,) = _features(model, [single])
        yield {
            name: float((together[name] - alone[name]).norm() / alone[name].norm())
            for name in alone
        }


def _draw(rows: Sequence[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    features, ap = figure.subplots(1, 2)
    batches = [row["batch"] for row in rows]
    for name in [name for name in rows[0] if name not in ("batch", "padding", "AP")]:
        features.plot(batches, [row[name] for row in rows], "o-", label=name)
    features.plot(
        batches, [row["padding"] for row in rows], "k--", label="share of padding"
    )
    ap.plot(batches, [row["AP"] for row in rows], "o-")
    features.set(
        title="Difference of features from those of single images",
        xlabel="images per batch",
        ylim=(0, None),
    )
    ap.set(title="Box AP", xlabel="images per batch", ylim=(0, 100))
    features.legend(fontsize=8)
    for axes in (features, ap):
        axes.set_xticks(batches)
        axes.grid(alpha=0.3)
    return figure
