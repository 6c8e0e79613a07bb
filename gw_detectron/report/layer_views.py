"""Feature maps and channel correlations before and after a norm layer."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data import DatasetMapper
from matplotlib.figure import Figure
from torch import Tensor, nn

from ..analysis.result import short_name
from ..analysis.whitening_statistics import whitening_layers
from ..data.dataset_mapper import ImageNamingMapper
from ..errors import ConfigError, similar_names
from ..layers import GroupWhitening2d
from ..norms import norm_rows, norm_spec
from ..ops.batch_whitening.channel_groups import split
from .run_folder import RunFolder, needed
from .sections import Picture, Section, Table

_MAPS = 8  # channels whose maps are drawn
_WIDTH = 64  # channels whose correlations are drawn, of layers without groups


def normalized(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a norm layer before its scale, shift and ReLU."""
    affine = {name: value for name, value in layer.state_dict().items() if name in ("weight", "bias")}
    plain = {
        name: torch.ones_like(value) if name == "weight" else torch.zeros_like(value) for name, value in affine.items()
    }
    return torch.func.functional_call(layer, plain, (x,))


def correlated_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the rows whose correlations the layer removes, or would if it whitened.

    Args:
        layer: the norm layer.
        x: its input or output, (N, C, H, W).

    Returns:
        GW and GN: (g, M) of the first sample. Other layers: (k, N H W) of the first group of channels.
    """
    if isinstance(layer, (GroupWhitening2d, nn.GroupNorm)):
        return x[0].reshape(layer.num_groups, -1)
    channels = x.transpose(0, 1).flatten(1)
    return split(channels, min(len(channels), getattr(layer, "channels_per_group", _WIDTH)))[0][0]


def correlation(rows: Tensor) -> np.ndarray:
    """Return the correlation matrix of rows; 0 for a constant row."""
    return torch.corrcoef(rows.double()).nan_to_num().reshape(len(rows), len(rows)).numpy()


def layers_section(run: RunFolder) -> Section:
    """Show feature maps and correlations before and after norm layers on one image.

    Raises:
        ConfigError: the model has no norm layer of a name.
    """
    names, known = run.options.layers, [row.layer for row in norm_rows(run.plain_model)]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--layers ('{name}'): not a norm layer of the model.{similar_names(name, known)} Fix: give names from "
                "the table of norms in the report."
            )
    model, record = run.model, run.records[0]
    with needed():
        image = ImageNamingMapper(DatasetMapper(run.cfg, is_train=False))(record)
    inputs = _inputs(model, names or _default_layers(model), image)
    pictures, rows, skipped = [], [], []
    for name, x in inputs.items():
        layer: Any = model.get_submodule(name)
        if x is None or not len(x):
            skipped.append(name)
            continue
        with torch.no_grad():
            y = normalized(layer, x)
        before, after = (correlation(correlated_rows(layer, value)) for value in (x, y))
        rows.append([name, _mean_off_diagonal(before), _mean_off_diagonal(after), len(before), norm_spec(layer)])
        title = f"{short_name(name)}, {norm_spec(layer)}"
        pictures += [
            [Picture.from_figure(f"maps_{name}", _plot_maps(x[0], y[0]), f"{title}: feature maps", min_width=640)],
            [Picture.from_figure(f"correlation_{name}", _plot_correlations(before, after), f"{title}: correlations")],
        ]
    text = (
        f"{Path(record['file_name']).name}, weights '{run.weights}'. Output before scale and shift. The rows of GW and "
        "GN are their groups, those of other norms the channels of the first group."
    )
    if skipped:
        text += f" Not reached by this image: {', '.join(skipped)}."
    numbers = [dict(zip(("layer", "before", "after", "rows", "norm"), row, strict=True)) for row in rows]
    shown = [[name, f"{before:.3f}", f"{after:.3f}", *others] for name, before, after, *others in rows]
    table = Table(["layer", "mean |correlation| before", "after", "rows", "norm"], shown)
    return Section("Features", numbers, text, pictures=pictures, tables=[table])


def _default_layers(model: nn.Module) -> list[str]:
    """Return the first, middle and last whitening layer of the backbone, else of all norm layers."""
    known = list(whitening_layers(model)) or [row.layer for row in norm_rows(model)]
    names = [name for name in known if name.startswith("backbone.bottom_up.")] or known
    return list(dict.fromkeys(names[place] for place in (0, len(names) // 2, -1))) if names else []


def _inputs(model: nn.Module, names: Sequence[str], image: dict[str, Any]) -> dict[str, Tensor | None]:
    """Return the input of each layer's first call, or None."""
    inputs: dict[str, Tensor | None] = dict.fromkeys(names)

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: tuple) -> None:
            if inputs[name] is None:
                inputs[name] = args[0].detach().clone()

        return hook

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(keep(name)))
        model([image])
    return inputs


def _mean_off_diagonal(matrix: np.ndarray) -> float:
    others = np.abs(matrix[~np.eye(len(matrix), dtype=bool)])
    return float(others.mean()) if len(others) else 0.0


def _plot_maps(x: Tensor, y: Tensor) -> Figure:
    channels = range(0, len(x), max(1, len(x) // _MAPS))[:_MAPS]
    height, width = x.shape[1:]
    figure = Figure(figsize=(1.5 * len(channels), 0.5 + 3 * height / width), layout="constrained")
    for label, maps, row in zip(
        ("before", "after"), (x, y), figure.subplots(2, len(channels), squeeze=False), strict=True
    ):
        row[0].set_ylabel(label)
        for axes, channel in zip(row, channels, strict=True):
            axes.imshow(maps[channel].numpy(), cmap="viridis")
            axes.set(xticks=[], yticks=[], title=f"channel {channel}" if label == "before" else "")
    return figure


def _plot_correlations(before: np.ndarray, after: np.ndarray) -> Figure:
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    grid = figure.subplots(1, 2)
    for axes, label, matrix in zip(grid, ("before", "after"), (before, after), strict=True):
        image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_title(f"{label}, mean |correlation| {_mean_off_diagonal(matrix):.2f}", fontsize="medium")
    figure.colorbar(image, ax=grid, shrink=0.8)
    return figure
