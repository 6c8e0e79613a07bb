"""Measure how well each layer of a detector whitens its input."""

import argparse
import contextlib
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.utils.env import seed_all_rng
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from gw_detectron.checkpoint import LoadReport, load_checkpoint, open_checkpoint
from gw_detectron.config import read_config
from gw_detectron.data.images import evaluation_input, image_files, read_image
from gw_detectron.data.synthetic import SyntheticConfig, draw_scene
from gw_detectron.errors import ConfigError, NonFiniteError, WeightsError, check_minimum, summarize_names
from gw_detectron.model_zoo import get_config_file
from gw_detectron.modeling import build_checked_model
from gw_detectron.norms import norm_spec
from gw_detectron.progress import progress_bar

from . import parse_seed
from .analysis_result import AnalysisResult, findings_of, short_name
from .whitening_stats import WhiteningLayer, checked_statistics, reduce_statistics, whitening_layers

_MODEL = get_config_file("quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml")
# title of a panel -> statistic, marker and label of its curves
_PANELS = {
    "Covariance of the input, with eps": [("trace", "k_", "trace, median")],
    "Condition number, median": [("condition_before", "s", "before"), ("condition_after", "o", "after")],
    "Residual after whitening": [
        ("residual", "o", r"$\|W S W^T - I\|_F / \sqrt{g}$, median"),
        ("residual_max", "_", "the same, largest"),
        ("distance", "^", r"$\|W - S^{-1/2}\|_F / \|S^{-1/2}\|_F$, median"),
    ],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this analysis to its command."""
    add = parser.add_argument
    add("--config-file", default=_MODEL, metavar="FILE", help="config of the model")
    add("--weights", default="", metavar="FILE", help="weights, if not MODEL.WEIGHTS of the config")
    add("--images", metavar="DIR", help="folder of images, if not synthetic ones")
    add("--count", type=int, default=2, help="number of images")
    add("--samples", type=int, default=8, help="largest number of samples of a layer per image")
    add("--seed", type=parse_seed, default=0, help="of random weights and synthetic images")
    partial = "accept weights that lack layers, which stay random, and weights of other norms"
    add("--allow-partial", action="store_true", help=partial)
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change")


def analyze_layers(
    *,
    config_file: str = _MODEL,
    weights: str = "",
    images: str | os.PathLike[str] | None = None,
    count: int = 2,
    samples: int = 8,
    seed: int = 0,
    allow_partial: bool = False,
    opts: Sequence[str] = (),
) -> AnalysisResult:
    """Measure every whitening layer of a detector in evaluation, see :mod:`experiments.whitening_stats`.

    Each image is a batch of its own, resized by ``INPUT.MIN_SIZE_TEST`` and ``MAX_SIZE_TEST``.

    Returns:
        One row per layer in the order of the calls, then the layers that were not called.

    Raises:
        MissingFileError, DataError: there are no such images.
        ConfigError: no whitening layers, or ``count`` or ``samples`` not positive.
        WeightsError: the weights lack a part of the backbone or of the whitening layers.
    """
    cfg = read_config(config_file, [*opts, *(["MODEL.WEIGHTS", weights] if weights else [])])
    for name, value in (("count", count), ("samples", samples)):
        check_minimum(name, value)
    paths = image_files(images)[:count] if images is not None else []
    names = [str(path.relative_to(str(images))) for path in paths] or [f"synthetic {index}" for index in range(count)]
    seed_all_rng(seed)
    model = build_checked_model(cfg, "cpu").eval()
    layers = whitening_layers(model)
    if not layers:
        raise ConfigError(
            "model: has no whitening layers. Fix: set MODEL.RESNETS.WHITEN_NORM and MODEL.RESNETS.WHITEN_POSITIONS."
        )
    checkpoint = open_checkpoint(cfg.MODEL.WEIGHTS) if cfg.MODEL.WEIGHTS else None
    report = load_checkpoint(model, checkpoint, allow_partial=allow_partial)
    if cfg.MODEL.WEIGHTS and not allow_partial:
        _check_loaded(report, layers)

    pictures = (read_image(p, cfg.INPUT.FORMAT) for p in paths) if paths else _draw_scenes(cfg, count, seed)
    bar = progress_bar(pictures, desc="layers", unit="image", total=len(names))
    calls, broken = _observe(model, ({"image": evaluation_input(picture, cfg)} for picture in bar), samples)
    rows: list[dict[str, Any]] = [
        {"layer": name, "norm": norm_spec(layers[name]), "finite": name not in broken if name in calls else None}
        | {key: value and float(f"{value:.4g}") for key, value in reduce_statistics(calls.get(name, [])).items()}
        for name in [*calls, *(name for name in layers if name not in calls)]
    ]
    settings = {
        "weights": cfg.MODEL.WEIGHTS or "random",
        "loaded": str(report),
        "images": names,
        "samples": samples,
        "seed": seed,
    }
    return AnalysisResult("layers", settings, rows, _findings(rows), _draw(rows, settings))


def _observe(
    model: nn.Module, inputs: Iterable[dict[str, Any]], samples: int
) -> tuple[dict[str, list[dict[str, Tensor]]], set[str]]:
    """Run a model and collect the statistics of its whitening layers.

    Returns:
        Layer name -> the statistics of its calls, and the names of the layers that are not finite.
    """
    calls: dict[str, list[dict[str, Tensor]]] = {}  # in the order in which the layers are called
    broken: set[str] = set()

    def observe(name: str, layer: WhiteningLayer, args: tuple, output: Tensor | None) -> None:
        found = calls.setdefault(name, [])
        try:
            if output is None:
                broken.add(name)  # the layer raised an error
            else:
                found.append(checked_statistics(name, layer, args[0], output, samples))
        except FloatingPointError:
            broken.add(name)

    with contextlib.ExitStack() as stack, torch.no_grad():
        for name, layer in whitening_layers(model).items():
            stack.enter_context(layer.register_forward_hook(functools.partial(observe, name), always_call=True))
        for image in inputs:
            with contextlib.suppress(NonFiniteError):  # the layer is in ``broken``
                model([image])
    return calls, broken


def _check_loaded(report: LoadReport, layers: Collection[str]) -> None:
    missing = {name.rpartition(".")[0] for name in report.new} & set(layers)
    if missing:
        raise WeightsError(
            f"MODEL.WEIGHTS: {report}\n  {len(missing)} of {len(layers)} whitening layers are missing: "
            f"{summarize_names(sorted(missing))}.\n"
            "  Fix: give weights of the whole detector, or accept random values with --allow-partial."
        )


def _draw_scenes(cfg: CfgNode, count: int, seed: int) -> Iterator[np.ndarray]:
    config = SyntheticConfig(seed=seed)
    for index in range(count):
        yield convert_PIL_to_numpy(Image.fromarray(draw_scene(config, "val", index).image()), cfg.INPUT.FORMAT)


def _findings(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    broken = [row["layer"] for row in rows if row["finite"] is False]
    finite = [row["finite"] for row in rows if row["finite"] is not None]
    better = [row["condition_after"] < row["condition_before"] for row in rows if row["condition_before"] is not None]
    first = f"; the first that is not: {broken[0]}" if broken else ""
    return findings_of(
        {
            f"input, covariance and output of all layers are finite{first}": finite,
            "every layer that was reached conditions better": better,
        }
    )


def _draw(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Figure:
    seen = [row for row in rows if row["trace"] is not None]
    places = list(range(len(seen)))
    figure = Figure(figsize=(max(8.0, 2.0 + 0.34 * len(seen)), 10.5), layout="constrained")
    grid = figure.subplots(len(_PANELS), 1, sharex=True)
    ends = ([row[key] for row in seen] for key in ("lambda_min", "lambda_max"))
    label = "eigenvalues, smallest to largest"
    grid[0].vlines(places, *ends, linewidth=4, color="tab:blue", alpha=0.6, label=label)
    for axes, (title, curves) in zip(grid, _PANELS.items(), strict=True):
        for key, marker, label in curves:
            points = [(place, row[key]) for place, row in enumerate(seen) if row[key] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker, markersize=6, label=label)
        axes.set(title=title, yscale="log")
        axes.grid(alpha=0.3)
        if seen:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    grid[-1].set_xticks(places, [short_name(row["layer"]) for row in seen], rotation=90, fontsize=8)
    figure.suptitle(f"Whitening layers, weights: {os.path.basename(settings['weights'])}")
    return figure
