"""Measure a trained detector on large images in tiles: box AP and time, by the statistics that its norms have.

Images are detected whole and in tiles (:class:`gw_detectron.workbench.predict.TiledPredictor`). In tiles, per-sample
norms have the statistics of

- ``tile``: each tile.
- ``image``: the image, as shipped: gathered from windows of 1600 pixels, so here from the whole image.
- ``windows``: the image, gathered from windows as large as tiles.
- ``shrunk``: the image, shrunk to the size of a tile.

The row ``SAHI`` is ``sahi.predict.get_sliced_prediction`` without a pass over the whole image, with NMS by IoU,
which it chooses at low scores.
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, Instances
from matplotlib.figure import Figure

from gw_detectron.config import changed_config, default_config
from gw_detectron.errors import ConfigError
from gw_detectron.layers import ImageStatistics
from gw_detectron.workbench.console import progress_bar
from gw_detectron.workbench.images import channels_first
from gw_detectron.workbench.predict import Predictor, TiledPredictor
from gw_detectron.workbench.predict.tile_merging import Window

from . import add_reduced, trained_detector
from .analysis_result import AnalysisResult, findings_of
from .trained_detector import box_ap, load_detector

REDUCED = {"images": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this experiment to its command."""
    parser.add_argument(
        "--tile",
        type=int,
        default=128,
        metavar="N",
        help="side of a tile, in the detector's pixels",
    )
    parser.add_argument(
        "--overlap", type=int, default=32, metavar="N", help="pixels that tiles share"
    )
    trained_detector.add_arguments(parser)
    add_reduced(parser, "4 images")


def analyze_tiling(
    *,
    config_file: str,
    weights: str,
    tile: int,
    overlap: int,
    images: int,
) -> AnalysisResult:
    """Compare box AP and time of whole images and of tiles.

    Args:
        config_file, weights, images: the trained detector, see :func:`experiments.trained_detector.load_detector`.
        tile, overlap: in pixels of the resized images; those that fit into one tile are left out.

    Returns:
        One row per way: AP, and seconds per image.

    Raises:
        ConfigError: all images fit into one tile.
        Other errors: see :func:`experiments.trained_detector.load_detector`.
    """
    model, inputs, evaluator = load_detector(config_file, weights, images)
    inputs = [each for each in inputs if max(each["image"].shape[1:]) > tile]
    if not inputs:
        raise ConfigError(
            f"tile ({tile}): all images are smaller. Fix: give fewer pixels."
        )
    unresized = changed_config(default_config(), {"INPUT.MIN_SIZE_TEST": 0})
    predictor = _Native(model, unresized, Metadata(), 0.05)
    ways: dict[str, Callable[[np.ndarray], Instances]] = {
        "whole": predictor,
        "tile": TiledPredictor(predictor, tile, overlap, "tile"),
        "image": TiledPredictor(predictor, tile, overlap),
        "windows": _Windows(predictor, tile, overlap),
        "shrunk": _Shrunk(predictor, tile, overlap),
    }
    if find_spec("sahi"):
        ways["SAHI"] = _sahi(predictor, tile, overlap)
    rows: list[dict[str, Any]] = []
    for name, way in ways.items():
        detections, seconds = _detect(name, way, inputs)
        ap = box_ap(evaluator, inputs, detections)
        row = {"statistics": name, "AP": round(ap, 2)}
        rows.append({**row, "seconds per image": round(seconds, 3)})
    aps = {row["statistics"]: row["AP"] for row in rows}
    findings = findings_of(
        {"statistics of the image raise the AP in tiles": [aps["image"] > aps["tile"]]}
    )
    settings = {"images": len(inputs)}
    return AnalysisResult("tiling", rows, findings, _draw(rows), settings)


class _Native(Predictor):
    """Takes images that are resized already, in the channel order of the model."""

    def input(self, image: np.ndarray, scale: float | None = None) -> dict[str, Any]:
        return {
            "image": channels_first(image),
            "height": image.shape[0],
            "width": image.shape[1],
        }


class _Windows(TiledPredictor):
    def measured_windows(self, image: np.ndarray, scale: float) -> list[Window]:
        # a scale that leaves no window larger than a tile
        return super().measured_windows(image, np.inf)


class _Shrunk(TiledPredictor):
    def measure(self, image: np.ndarray) -> ImageStatistics:
        scale = self.tile / max(image.shape[:2])
        small = torch.nn.functional.interpolate(
            channels_first(image)[None],
            scale_factor=scale,
            mode="bilinear",
            antialias=True,
        )
        return super().measure(small[0].permute(1, 2, 0).numpy())


def _sahi(
    predictor: Predictor, tile: int, overlap: int
) -> Callable[[np.ndarray], Instances]:
    from sahi.models.detectron2 import Detectron2DetectionModel
    from sahi.predict import get_sliced_prediction

    class Model(Detectron2DetectionModel):
        def set_model(self, model: Predictor) -> None:
            self.model = model

        def perform_inference(self, image: np.ndarray) -> None:
            self._original_predictions = {"instances": self.model(image)}

    names = {
        str(index): name
        for index, name in enumerate(predictor.metadata.get("thing_classes", []))
    } or None
    model = Model(
        model=predictor,
        confidence_threshold=predictor.score_threshold,
        category_mapping=names,
    )

    def predict(image: np.ndarray) -> Instances:
        options = {
            "overlap_height_ratio": overlap / tile,
            "overlap_width_ratio": overlap / tile,
            "verbose": 0,
        }
        options |= {
            "slice_height": tile,
            "slice_width": tile,
            "perform_standard_pred": False,
        }
        objects = get_sliced_prediction(
            image.astype(np.uint8), model, **options
        ).object_prediction_list
        found = Instances(
            image.shape[:2], scores=torch.tensor([each.score.value for each in objects])
        )
        found.pred_boxes = Boxes(
            torch.tensor([each.bbox.to_xyxy() for each in objects]).reshape(-1, 4)
        )
        found.pred_classes = torch.tensor(
            [each.category.id for each in objects], dtype=torch.long
        )
        return found

    return predict


def _detect(
    name: str, way: Callable[[np.ndarray], Instances], inputs: list[dict[str, Any]]
) -> tuple[list[Instances], float]:
    """Return the detections in pixels of the photos, and the seconds per image."""
    images = [each["image"].permute(1, 2, 0).numpy() for each in inputs]
    begin = time.perf_counter()
    found = [way(image) for image in progress_bar(images, desc=name, unit="image")]
    seconds = (time.perf_counter() - begin) / len(images)

    for each, instances in zip(inputs, found, strict=True):
        height, width = instances.image_size
        scale = each["width"] / width, each["height"] / height
        instances.pred_boxes.scale(*scale)
    return found, seconds


def _draw(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([row["statistics"] for row in rows], [row["AP"] for row in rows])
    axes.bar_label(
        bars,
        [f"{row['AP']:.1f}, {row['seconds per image']:.2f} s" for row in rows],
        padding=3,
    )
    axes.invert_yaxis()
    axes.set(
        title="Box AP and seconds per image",
        xlim=(0, max(1.0, *(1.3 * row["AP"] for row in rows))),
    )
    return figure
