"""The whitening layers of a real detector on images: what each gets, and how well it whitens it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.data.detection_utils import convert_PIL_to_numpy, read_image
from detectron2.modeling import build_model
from detectron2.utils.env import seed_all_rng
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from ..checkpoint import strict_backbone_load
from ..data.synthetic import SyntheticConfig, draw_scene
from ..modeling import norm_spec
from .outcome import Outcome, short_name
from .spectra import WhiteningLayer, reduce_spectra, spectra, whitening_layers

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def analyze_layers(
    cfg: CfgNode,
    images: str | os.PathLike[str] | None = None,
    *,
    count: int = 2,
    samples: int = 8,
    seed: int = 0,
    progress: bool = True,
) -> Outcome:
    """Runs a detector in evaluation and looks at every whitening layer.

    Args:
        cfg: the config. ``MODEL.WEIGHTS`` are loaded, which may be of a detector or of the backbone alone, or random if
            it is empty. Images are resized by ``INPUT.MIN_SIZE_TEST`` and ``MAX_SIZE_TEST``.
        images: a folder of images; None draws synthetic ones.
        count: images, each run through the model by itself.
        samples: the most samples, images or regions, of a layer that are looked at for each image.
        seed: of random weights.
        progress: show how far it is.

    Returns:
        One row for each layer, in the order in which they are called, then those that were not: the numbers of
        :mod:`.spectra`.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the model has no whitening layers, ``count`` is not positive, or there are no images.
        Other errors: see :func:`gw_detectron.checkpoint.strict_backbone_load`.
    """
    if count < 1:
        raise ValueError(f"count={count} images: it has to be 1 or more")
    seed_all_rng(seed)
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg).eval()
    layers = whitening_layers(model)
    if not layers:
        raise ValueError("the model has no whitening layers; see MODEL.RESNETS.WHITEN_NORM and WHITEN_POSITIONS")
    with strict_backbone_load(model, cfg.MODEL.WEIGHTS, allow_partial=True) as report:
        DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    found: dict[str, list[dict[str, Tensor]]] = {}  # in the order in which the layers are called
    broken: set[str] = set()

    def observe(name: str, layer: WhiteningLayer, args: tuple, output: Tensor) -> None:
        calls = found.setdefault(name, [])
        if torch.isfinite(args[0]).all() and torch.isfinite(output).all():
            calls.append(spectra(layer, args[0], samples))
        else:
            broken.add(name)

    handles = [
        layer.register_forward_hook(lambda layer, args, output, name=name: observe(name, layer, args, output))
        for name, layer in layers.items()
    ]
    names, batch = _inputs(cfg, images, count, seed)
    try:
        with torch.no_grad():
            for image in tqdm(batch, desc="layers", unit="image", disable=not progress):
                model([image])
    finally:
        for handle in handles:
            handle.remove()
    rows = [
        {"layer": name, "norm": norm_spec(layers[name]), "finite": name not in broken}
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


def _inputs(
    cfg: CfgNode, folder: str | os.PathLike[str] | None, count: int, seed: int
) -> tuple[list[str], list[dict[str, Any]]]:
    if folder is None:
        config = SyntheticConfig(num_val=count, seed=seed)
        names = [f"synthetic {index}" for index in range(count)]
        scenes = [Image.fromarray(np.asarray(draw_scene(config, "val", index).image())) for index in range(count)]
        arrays = [convert_PIL_to_numpy(scene, cfg.INPUT.FORMAT) for scene in scenes]
    else:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder {folder} of images")
        paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in _SUFFIXES)[:count]
        if not paths:
            raise ValueError(f"there are no images ({', '.join(_SUFFIXES)}) below {folder}")
        names = [str(path.relative_to(folder)) for path in paths]
        arrays = [read_image(str(path), format=cfg.INPUT.FORMAT) for path in paths]
    resize = T.ResizeShortestEdge([cfg.INPUT.MIN_SIZE_TEST] * 2, cfg.INPUT.MAX_SIZE_TEST)
    batch = []
    for array in arrays:
        resized = resize.get_transform(array).apply_image(array)
        pixels = torch.as_tensor(np.ascontiguousarray(resized.transpose(2, 0, 1).astype("float32")))
        batch.append({"image": pixels, "height": array.shape[0], "width": array.shape[1]})
    return names, batch


def _findings(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    broken = [row["layer"] for row in rows if not row["finite"]]
    better = [row["condition_after"] < row["condition_before"] for row in rows if row["condition_before"] is not None]
    first = f"; the first that is not: {broken[0]}" if broken else ""
    return {
        f"input and output of all layers are finite{first}": not broken,
        "every layer that was reached conditions better": all(better),
    }


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
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    residuals.set_xticks(places, [short_name(row["layer"]) for row in seen], rotation=90, fontsize=8)
    figure.suptitle(f"Whitening layers, weights: {os.path.basename(settings['weights'])}")
    return figure


def _dots(axes: Axes, rows: Sequence[dict[str, Any]], key: str, marker: str, label: str) -> None:
    points = [(place, row[key]) for place, row in enumerate(rows) if row[key] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), marker, markersize=6, label=label)
