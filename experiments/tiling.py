r"""Measure what tiled inference changes in a detector whose norms see single samples.

A large image is cut into tiles that do not overlap, and each tile is detected as an image. Norms of each sample then
have statistics of the tile. Three ways are compared: "whole", the whole image, whose detections are cut into tiles
afterwards; "own", each tile with its own statistics; "joint", tiles with the statistics of all tiles
(:func:`gw_detectron.layers.joint_statistics`).

The difference of a level is that of its features from those of the whole image,
:math:`\lVert f_{tiles} - f \rVert / \lVert f \rVert`, averaged over images. AP is that of the objects in tiles, of
which at least half is inside.
"""

import argparse
import statistics
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from detectron2.structures import Boxes, Instances
from matplotlib.figure import Figure
from torch import Tensor

from gw_detectron.errors import ConfigError
from gw_detectron.layers import joint_statistics
from gw_detectron.progress import progress_bar

from . import add_reduced, trained_detector
from .analysis_result import AnalysisResult, findings_of
from .trained_detector import Example, box_ap, detect, load_detector

REDUCED = {"tiles": [2], "images": 4}
_LEAST_INSIDE = 0.5  # of a box


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this experiment to its command."""
    parser.add_argument("--tiles", type=int, nargs="+", default=[2, 4], metavar="N", help="tiles per side")
    trained_detector.add_arguments(parser)
    add_reduced(parser, "2 tiles per side, 4 images")


def analyze_tiling(*, config_file: str, weights: str, tiles: Sequence[int] = (2, 4), images: int = 0) -> AnalysisResult:
    """Compare features and box AP of whole images and of their tiles.

    Args:
        config_file, weights, images: the trained detector, see :func:`experiments.trained_detector.load_detector`.
        tiles: tiles per side. Images are cut at the right and the bottom, so that the sides of tiles are multiples of
            the backbone's ``size_divisibility``; smaller ones are left out.

    Returns:
        One row per number of tiles and way: difference of each level, AP.

    Raises:
        ConfigError: a number of tiles is not positive, or all images are smaller than such tiles.
        Other errors: see :func:`experiments.trained_detector.load_detector`.
    """
    if not tiles or min(tiles) < 1:
        raise ConfigError(f"tiles ({list(tiles)}): expected positive numbers. Fix: give 1 or more.")
    model, examples = load_detector(config_file, weights, images)
    rows: list[dict[str, Any]] = []
    for n in tiles:
        step = n * max(1, model.backbone.size_divisibility)
        fitting = [_cut(example, step) for example in examples if min(example.image.shape[1:]) >= step]
        if not fitting:
            raise ConfigError(f"tiles ({n}): no image has {step} pixels per side. Fix: give fewer tiles.")
        bar = progress_bar(fitting, desc=f"{n} x {n} tiles", unit="image")
        rows += _compare(model, n, bar)
    levels = [name for name in rows[0] if name not in ("tiles", "images", "statistics", "AP")]
    pairs = zip(rows[1::3], rows[2::3], strict=True)
    findings = findings_of(
        {"joint statistics raise the AP in tiles": [joint["AP"] > own["AP"] for own, joint in pairs]}
    )
    settings = {"config": config_file, "weights": weights, "images": len(examples)}
    return AnalysisResult("tiling", settings, rows, findings, _draw(rows, levels))


def _compare(model: Any, n: int, examples: Iterable[Example]) -> list[dict[str, Any]]:
    truth: list[Example] = []
    found: dict[str, list[Instances]] = {}
    differences: dict[tuple[str, str], list[float]] = {}
    for example in examples:
        cut = _tiles(example.image, n)
        side = cut.shape[2:]
        corners = [(row * side[0], column * side[1]) for row in range(n) for column in range(n)]
        truth += [_objects_in(example, tile, corner) for tile, corner in zip(cut, corners, strict=True)]
        (whole,) = detect(model, [example.image])
        expected = {name: _tiles(values[0], n) for name, values in _features(model, example.image[None]).items()}
        outcomes = {"whole": ([_detections_in(whole, corner, side) for corner in corners], expected)}
        for way, context in (("own", nullcontext()), ("joint", joint_statistics(model.backbone))):
            with context:
                outcomes[way] = detect(model, list(cut)), _features(model, cut)
        for way, (detections, features) in outcomes.items():
            found.setdefault(way, []).extend(detections)
            for name, values in expected.items():
                difference = float((features[name] - values).norm() / values.norm())
                differences.setdefault((way, name), []).append(difference)
    return [
        {"tiles": n, "images": len(truth) // n**2, "statistics": way}
        | {name: round(statistics.mean(differences[way, name]), 4) for name in expected}
        | {"AP": round(box_ap(truth, detections), 2)}
        for way, detections in found.items()
    ]


@torch.no_grad()
def _features(model: Any, images: Tensor) -> dict[str, Tensor]:
    """Return the levels whose cells do not cross the edges of tiles."""
    backbone = model.backbone
    maps = backbone(model.preprocess_image([{"image": image} for image in images]).tensor)
    strides = {name: shape.stride for name, shape in backbone.output_shape().items()}
    return {name: maps[name] for name, stride in strides.items() if backbone.size_divisibility % stride == 0}


def _tiles(image: Tensor, n: int) -> Tensor:
    """Cut (C, H, W) into (n n, C, H / n, W / n), row by row."""
    rows = image.unflatten(1, (n, -1)).unflatten(3, (n, -1))  # C, n, H / n, n, W / n
    return rows.permute(1, 3, 0, 2, 4).flatten(0, 1)


def _cut(example: Example, step: int) -> Example:
    """Shorten the sides of an image to multiples of a step."""
    height, width = (side // step * step for side in example.image.shape[1:])
    tensor = example.image[:, :height, :width]
    return _objects_in(example._replace(image=tensor), tensor, (0, 0))


def _objects_in(example: Example, tile: Tensor, corner: tuple[int, int]) -> Example:
    boxes, inside = _clip(example.boxes, corner, (tile.shape[1], tile.shape[2]))
    return Example(tile, boxes[inside], example.classes[inside], example.crowds[inside])


def _detections_in(found: Instances, corner: tuple[int, int], side: Sequence[int]) -> Instances:
    boxes, inside = _clip(found.pred_boxes.tensor.numpy(), corner, side)
    kept = found[torch.from_numpy(inside)]
    kept.pred_boxes = Boxes(torch.from_numpy(boxes[inside]))
    return kept


def _clip(boxes: np.ndarray, corner: tuple[int, int], side: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Clip boxes to a tile; return them in its pixels, and which are inside by half."""
    shifted = boxes - np.array([corner[1], corner[0]] * 2)
    clipped = shifted.clip(0, np.array([side[1], side[0]] * 2))
    return clipped, _area(clipped) >= _LEAST_INSIDE * _area(shifted)


def _area(boxes: np.ndarray) -> np.ndarray:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _draw(rows: Sequence[dict[str, Any]], levels: Sequence[str]) -> Figure:
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    features, ap = figure.subplots(1, 2)
    numbers = sorted({row["tiles"] for row in rows})
    for way, style in (("whole", "k:"), ("own", "s--"), ("joint", "o-")):
        chosen = [row for n in numbers for row in rows if (row["tiles"], row["statistics"]) == (n, way)]
        ap.plot(numbers, [row["AP"] for row in chosen], style, label=way)
        for color, name in enumerate(levels if way != "whole" else []):
            values = [row[name] for row in chosen]
            features.plot(numbers, values, style, color=f"C{color}", label=f"{name}, {way}", markersize=4)
    features.set(title="Difference of features from those of the whole image", xlabel="tiles per side", ylim=(0, None))
    ap.set(title="Box AP in tiles", xlabel="tiles per side", ylim=(0, None))
    for axes in (features, ap):
        axes.set_xticks(numbers)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure
