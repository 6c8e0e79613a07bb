"""The whitening layers of a real detector on images: what each gets, and how well it whitens it."""

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.modeling import build_model
from detectron2.utils.env import seed_all_rng
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ..checkpoint import LoadReport, PartialLoadError, load_checkpoint, open_checkpoint
from ..data.images import read_image
from ..data.synthetic import SyntheticConfig, draw_scene
from ..errors import summarize_names
from ..modeling import norm_spec
from ..ops.solvers import NonFiniteCovarianceError
from .outcome import Outcome, findings_of, short_name
from .spectra import WhiteningLayer, observed, reduce_spectra, whitening_layers

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def analyze_layers(
    cfg: CfgNode,
    images: str | os.PathLike[str] | None = None,
    *,
    count: int = 2,
    samples: int = 8,
    seed: int = 0,
    allow_partial: bool = False,
    progress: bool = True,
) -> Outcome:
    """Runs a detector in evaluation and looks at every whitening layer.

    Args:
        cfg: the config. ``MODEL.WEIGHTS`` are loaded; without them the model is random. Images are resized by
            ``INPUT.MIN_SIZE_TEST`` and ``MAX_SIZE_TEST``.
        images: a folder of images; None draws synthetic ones.
        count: images, each run through the model by itself.
        samples: the most samples, images or regions, of a layer that are looked at for each image.
        seed: of random weights and synthetic images.
        allow_partial: accept weights that lack a part of the backbone or of the whitening layers, such as those of a
            backbone alone for a detector that whitens in its heads; what they lack is random.
        progress: show how far it is.

    Returns:
        One row for each layer, in the order in which they are called, then those that were not: the numbers of
        :mod:`.spectra`.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the model has no whitening layers, ``count`` or ``samples`` is not positive, there are no images, or
            one of them cannot be read.
        PartialLoadError: the weights lack a part of the backbone or of the whitening layers.
        Other errors: see :func:`gw_detectron.checkpoint.load_checkpoint`.
    """
    if count < 1:
        raise ValueError(f"count={count} images: it has to be 1 or more")
    if samples < 1:
        raise ValueError(f"samples={samples} of a layer: it has to be 1 or more")
    paths = _image_files(images, count) if images is not None else []
    seed_all_rng(seed)
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg).eval()
    layers = whitening_layers(model)
    if not layers:
        raise ValueError("the model has no whitening layers; see MODEL.RESNETS.WHITEN_NORM and WHITEN_POSITIONS")
    checkpoint = open_checkpoint(cfg.MODEL.WEIGHTS) if cfg.MODEL.WEIGHTS else None
    report = load_checkpoint(DetectionCheckpointer(model), checkpoint, allow_partial=allow_partial)
    if cfg.MODEL.WEIGHTS and not allow_partial:
        _check_loaded(report, layers)
    found: dict[str, list[dict[str, Tensor]]] = {}  # in the order in which the layers are called
    broken: set[str] = set()

    def observe(name: str, layer: WhiteningLayer, args: tuple, output: Tensor | None) -> None:
        calls = found.setdefault(name, [])
        try:
            if output is None:
                broken.add(name)  # the layer itself has raised
            else:
                calls.append(observed(name, layer, args[0], output, samples))
        except FloatingPointError:
            broken.add(name)

    handles = [
        layer.register_forward_hook(
            lambda layer, args, output, name=name: observe(name, layer, args, output), always_call=True
        )
        for name, layer in layers.items()
    ]
    names = [str(path.relative_to(str(images))) for path in paths] or [f"synthetic {index}" for index in range(count)]
    form = cfg.INPUT.FORMAT
    pictures = (read_image(path, form) for path in paths) if paths else _drawn(count, seed, form)
    resize = T.ResizeShortestEdge([cfg.INPUT.MIN_SIZE_TEST] * 2, cfg.INPUT.MAX_SIZE_TEST)
    try:
        with torch.no_grad():
            for picture in tqdm(pictures, total=len(names), desc="layers", unit="image", disable=not progress):
                with contextlib.suppress(NonFiniteCovarianceError):  # the layer that raises it is known to be broken
                    model([_input(picture, resize)])
    finally:
        for handle in handles:
            handle.remove()
    rows: list[dict[str, Any]] = [
        {"layer": name, "norm": norm_spec(layers[name]), "finite": name not in broken if name in found else None}
        | {key: None if value is None else float(f"{value:.4g}") for key, value in reduce_spectra(calls).items()}
        for name, calls in (found | {name: [] for name in layers if name not in found}).items()
    ]
    settings = {
        "weights": cfg.MODEL.WEIGHTS or "random",
        "loaded": str(report),
        "images": names,
        "samples": samples,
        "seed": seed,
    }
    return Outcome("layers", settings, rows, _findings(rows), _draw(rows, settings))


def _check_loaded(report: LoadReport, layers: Collection[str]) -> None:
    lacking = {name.rpartition(".")[0] for name in report.new} & set(layers)
    if lacking:
        raise PartialLoadError(
            f"{report}\n"
            f"  the weights lack {len(lacking)} of {len(layers)} whitening layers: {summarize_names(sorted(lacking))}\n"
            "  give weights of the whole detector, or allow the rest to start from random values with --allow-partial"
        )


def _image_files(folder: str | os.PathLike[str], count: int) -> list[Path]:
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder} of images")
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in _SUFFIXES)[:count]
    if not paths:
        raise ValueError(f"there are no images ({', '.join(_SUFFIXES)}) below {folder}")
    return paths


def _drawn(count: int, seed: int, pixel_format: str) -> Iterator[np.ndarray]:
    config = SyntheticConfig(num_val=count, seed=seed)
    for index in range(count):
        scene = Image.fromarray(np.asarray(draw_scene(config, "val", index).image()))
        yield convert_PIL_to_numpy(scene, pixel_format)


def _input(picture: np.ndarray, resize: T.Augmentation) -> dict[str, Any]:
    resized = resize.get_transform(picture).apply_image(picture)
    pixels = torch.as_tensor(np.ascontiguousarray(resized.transpose(2, 0, 1).astype("float32")))
    return {"image": pixels, "height": picture.shape[0], "width": picture.shape[1]}


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
    figure = Figure(figsize=(max(8.0, 2.0 + 0.34 * len(seen)), 10.5), layout="constrained")
    eigenvalues, conditions, residuals = figure.subplots(3, 1, sharex=True)
    places = list(range(len(seen)))
    eigenvalues.vlines(
        places,
        [row["lambda_min"] for row in seen],
        [row["lambda_max"] for row in seen],
        linewidth=4,
        color="tab:blue",
        alpha=0.6,
        label="eigenvalues, least to largest",
    )
    _dots(eigenvalues, seen, "trace", "k_", "trace, median")
    eigenvalues.set_title("Covariance of the input, with eps")
    _dots(conditions, seen, "condition_before", "s", "before")
    _dots(conditions, seen, "condition_after", "o", "after")
    conditions.set_title("Condition number, median")
    _dots(residuals, seen, "residual", "o", r"$\|W S W^T - I\|_F / \sqrt{g}$, median")
    _dots(residuals, seen, "residual_max", "_", "the same, largest")
    _dots(residuals, seen, "distance", "^", r"$\|W - S^{-1/2}\|_F / \|S^{-1/2}\|_F$, median")
    residuals.set_title("What is left to whiten")
    for axes in (eigenvalues, conditions, residuals):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if seen:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    residuals.set_xticks(places, [short_name(row["layer"]) for row in seen], rotation=90, fontsize=8)
    figure.suptitle(f"Whitening layers, weights: {os.path.basename(settings['weights'])}")
    return figure


def _dots(axes: Axes, rows: Sequence[dict[str, Any]], key: str, marker: str, label: str) -> None:
    points = [(place, row[key]) for place, row in enumerate(rows) if row[key] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), marker, markersize=6, label=label)
