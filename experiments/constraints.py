"""Compare how strongly norms constrain their output.

The methods of the paper's Table 1 are compared, and the norm layers of a config.

Source: Group Whitening, section 4 and Table 1.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, check_minimum

from .analysis_result import AnalysisResult, short_name
from .feasibility import (
    Constraints,
    batch_constraints,
    group_constraints,
    max_groups,
    min_columns,
)
from .norm_shapes import NormShape, norm_shapes

_MODEL = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml"
_COLUMNS = (
    "layer",
    "norm",
    "constraints",
    "variables",
    "ratio",
    "over_examples",
    "range",
    "remark",
)
_COLORS = {"GW": "tab:orange", "BW": "tab:purple", "GN": "tab:blue", "LN": "tab:cyan"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this analysis to its command."""
    add = parser.add_argument
    add("--neurons", type=int, default=256, help="d of the table")
    add("--batch-size", type=int, default=1024, help="m of the table")
    add("--groups", type=int, default=16, help="g of the table")
    add(
        "--examples",
        type=int,
        default=0,
        help="N, the size of a training set; 0: one batch",
    )
    add(
        "--config-file",
        default=_MODEL,
        metavar="FILE",
        help="config of the model; '' leaves it out",
    )
    add("--height", type=int, default=800, help="of the model's images, in pixels")
    add("--width", type=int, default=1333, help="of the model's images, in pixels")
    add("--images", type=int, default=2, help="images per GPU")
    add(
        "opts",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help="config keys to change",
    )


def analyze_constraints(
    *,
    neurons: int,
    batch_size: int,
    groups: int,
    examples: int,
    config_file: str,
    height: int,
    width: int,
    images: int,
    opts: Sequence[str],
) -> AnalysisResult:
    """Count the constraints of BN, BW, GN and GW by the paper's formulas, then of every norm layer of a detector.

    Raises:
        ConfigError: a number is out of range, or the batch size does not divide the examples.
    """
    for name, value in (
        ("batch_size", batch_size),
        ("height", height),
        ("width", width),
        ("images", images),
    ):
        check_minimum(name, value)
    check_minimum("examples", examples, 0)
    examples = examples or batch_size
    if examples % batch_size:
        raise ConfigError(
            f"examples ({examples}): not a multiple of batch_size={batch_size}. Fix: give a multiple."
        )
    table = _table(neurons, batch_size, groups)
    rows = []
    for method, (found, allowed) in table.items():
        setting = f"d={neurons}, m={batch_size}" + f", g={groups}" * (method[0] == "G")
        number = found.number * (examples // batch_size)
        rows.append(_row(setting, method, found, over_examples=number, range=allowed))
    layers = (
        norm_shapes(read_config(config_file, list(opts)), height, width, images)
        if config_file
        else []
    )
    rows += [_layer_row(layer) for layer in layers]
    title = f"Layers of the model, {images} images of {height} x {width} per GPU"
    figure = _draw(layers, neurons, title)
    return AnalysisResult("constraints", rows, _findings(table, layers), figure)


def _table(d: int, m: int, g: int) -> dict[str, tuple[Constraints, str]]:
    """Map each method to its constraints and feasible range."""
    return {
        "BN": (batch_constraints(d, m), f"m >= {min_columns(1)}"),
        "BW": (batch_constraints(d, m, d), f"m >= {min_columns(d)}"),
        "GN": (
            group_constraints(d, m, g, whiten=False),
            f"g <= {max_groups(d, whiten=False)}",
        ),
        "GW": (
            group_constraints(d, m, g, whiten=True),
            f"g <= {max_groups(d, whiten=True)}",
        ),
    }


def _row(
    layer: str, norm: str, found: Constraints | None, **more: Any
) -> dict[str, Any]:
    row = dict.fromkeys(_COLUMNS) | {"layer": layer, "norm": norm}
    if found is not None:
        row |= {
            "constraints": found.number,
            "variables": found.variables,
            "remark": found.remark,
        }
        row["ratio"] = float(f"{found.ratio:.4g}")
    return row | more


def _layer_row(layer: NormShape) -> dict[str, Any]:
    found = layer.constraints
    if found is None:
        reason = (
            "not reached: shape unknown" if layer.shape is None else "fixed statistics"
        )
        return _row(layer.layer, layer.spec, None, remark=reason)
    allowed = f"{found.columns} columns >= {min_columns(found.rows)}"
    return _row(layer.layer, layer.spec, found, range=allowed)


def _findings(
    table: Mapping[str, tuple[Constraints, str]], layers: Sequence[NormShape]
) -> dict[str, bool]:
    bn, bw, gn, gw = (table[method][0].number for method in ("BN", "BW", "GN", "GW"))
    findings = {
        "whitening puts more constraints than standardizing": bw > bn and gw >= gn
    }
    known = [layer.constraints for layer in layers if layer.constraints is not None]
    if known:
        findings["every layer of the model is feasible"] = all(
            found.feasible for found in known
        )
        findings["every layer of the model is stable"] = all(
            found.stable for found in known
        )
    return findings


def _draw(layers: Sequence[NormShape], neurons: int, title: str) -> Figure:
    known = [
        (layer, layer.constraints.ratio)
        for layer in layers
        if layer.constraints is not None
    ]
    rows = 2 if known else 1
    figure = Figure(
        figsize=(max(11.0, 2.2 + 0.2 * len(known)), 4.6 * rows), layout="constrained"
    )
    parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    _draw_table(parts[0].subplots(1, 2), neurons)
    if known:
        _draw_layers(parts[1].subplots(), known, title)
    return figure


def _draw_table(panels: Sequence[Axes], d: int) -> None:
    groups = [g for g in range(1, d + 1) if d % g == 0]
    batches = [2**power for power in range(1, 13)]
    group_curves = {
        f"{method}, feasible for g <= {max_groups(d, whiten)}": [
            group_constraints(d, 1, g, whiten).ratio for g in groups
        ]
        for method, whiten in (("GN", False), ("GW", True))
    }
    batch_curves = {
        f"{method}, feasible for m >= {min_columns(width)}": [
            batch_constraints(d, m, width).ratio for m in batches
        ]
        for method, width in (("BN", 1), ("BW", d))
    }
    for axes, places, curves in zip(
        panels, (groups, batches), (group_curves, batch_curves), strict=True
    ):
        for label, ratios in curves.items():
            axes.plot(places, ratios, "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _mark_infeasible(
            axes, [ratio for ratios in curves.values() for ratio in ratios]
        )
    panels[0].set(title=f"d = {d} neurons, per sample", xlabel="groups g")
    panels[1].set(title=f"d = {d} neurons, over the batch", xlabel="batch size m")


def _draw_layers(
    axes: Axes, layers: Sequence[tuple[NormShape, float]], title: str
) -> None:
    kinds = [layer.spec.partition(":")[0] for layer, _ in layers]
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        ratios = [layers[place][1] for place in places]
        axes.plot(places, ratios, "o", color=_COLORS.get(kind, "0.45"), label=kind)
    axes.set_xticks(
        range(len(layers)),
        [short_name(layer.layer) for layer, _ in layers],
        rotation=90,
        fontsize=7,
    )
    axes.set_xlim(-1, len(layers))
    axes.set_title(title)
    _mark_infeasible(axes, [ratio for _, ratio in layers])


def _mark_infeasible(axes: Axes, ratios: Sequence[float]) -> None:
    axes.axhline(1, color="tab:red", linewidth=1.2)
    axes.axhspan(1, 1e9, color="tab:red", alpha=0.08, label="infeasible")
    axes.set(
        yscale="log",
        ylim=(min(ratios) / 3, max(*ratios, 3) * 3),
        ylabel="constraints / variables",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
