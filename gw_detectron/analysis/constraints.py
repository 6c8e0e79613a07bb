"""The constraints that normalisation puts on features: the paper's table, and every layer of a config.

Source: Group Whitening, section 4 and Table 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .feasibility import Constraints, batch_constraints, group_constraints, least_columns, most_groups
from .norm_shapes import NormShape, norm_shapes
from .outcome import Outcome, short_name


def analyze_constraints(
    cfg: CfgNode | None = None,
    *,
    neurons: int = 256,
    batch_size: int = 1024,
    groups: int = 16,
    examples: int = 0,
    height: int = 800,
    width: int = 1333,
    images: int = 2,
) -> Outcome:
    """Counts constraints by the formulas of the paper, and for the layers of a detector in training.

    Args:
        cfg: the detector; None leaves it out.
        neurons: d of the table.
        batch_size: m of the table.
        groups: g of the table; it divides ``neurons``.
        examples: N, the constraints over a training set of so many; 0 is one batch.
        height, width: of the detector's images, in pixels.
        images: images of a GPU.

    Returns:
        One row for each of BN, BW, GN, GW, then one for each normalisation layer of the detector.

    Raises:
        ValueError: a number is out of its range, or the batch size does not divide the examples.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("examples", examples, 0)):
        if value < least:
            raise ValueError(f"{name}={value} has to be {least} or more")
    examples = examples or batch_size
    if examples % batch_size:
        raise ValueError(f"examples={examples} is not a multiple of batch_size={batch_size}")
    table = _table(neurons, batch_size, groups)
    rows = [
        _row(method, f"d={neurons}, m={batch_size}" + f", g={groups}" * (method[0] == "G"), found)
        | {"over_examples": found.number * (examples // batch_size), "range": text}
        for method, (found, text) in table.items()
    ]
    layers = norm_shapes(cfg, height, width, images) if cfg is not None else []
    rows += [_layer_row(layer) for layer in layers]
    settings = {
        "neurons": neurons,
        "batch_size": batch_size,
        "groups": groups,
        "examples": examples,
        "height": height,
        "width": width,
        "images": images,
    }
    return Outcome("constraints", settings, rows, _findings(table, layers), _draw(layers, settings))


def _table(d: int, m: int, g: int) -> dict[str, tuple[Constraints, str]]:
    """Method -> its constraints, and the range of m or g in which it is feasible."""
    return {
        "BN": (batch_constraints(d, m), f"m >= {least_columns(1)}"),
        "BW": (batch_constraints(d, m, d), f"m >= {least_columns(d)}"),
        "GN": (group_constraints(d, m, g, whiten=False), f"g <= {most_groups(d, whiten=False)}"),
        "GW": (group_constraints(d, m, g, whiten=True), f"g <= {most_groups(d, whiten=True)}"),
    }


def _row(norm: str, where: str, found: Constraints | None) -> dict[str, Any]:
    return {
        "layer": where,
        "norm": norm,
        "constraints": found and found.number,
        "variables": found and found.variables,
        "ratio": found and float(f"{found.ratio:.4g}"),
        "over_examples": None,
        "range": None,
        "remark": found and found.remark,
    }


def _layer_row(layer: NormShape) -> dict[str, Any]:
    row = _row(layer.spec, layer.layer, layer.constraints)
    if layer.constraints is None:
        row["remark"] = "not reached: no shape is known" if layer.shape is None else "its statistics are fixed"
    else:
        row["range"] = f"{layer.constraints.columns} columns >= {least_columns(layer.constraints.side)}"
    return row


def _findings(table: Mapping[str, tuple[Constraints, str]], layers: Sequence[NormShape]) -> dict[str, bool]:
    number = {method: found.number for method, (found, _) in table.items()}
    findings = {
        "whitening puts more constraints than standardising": (
            number["BW"] > number["BN"] and number["GW"] >= number["GN"]
        )
    }
    known = [layer.constraints for layer in layers if layer.constraints is not None]
    if known:
        findings["every layer of the model is feasible"] = all(found.feasible for found in known)
        findings["every layer of the model is stable"] = all(found.stable for found in known)
    return findings


def _draw(layers: Sequence[NormShape], settings: dict[str, Any]) -> Figure:
    known = [(layer, layer.constraints.ratio) for layer in layers if layer.constraints is not None]
    rows = 2 if known else 1
    figure = Figure(figsize=(max(11.0, 2.2 + 0.2 * len(known)), 4.6 * rows), layout="constrained")
    parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    _draw_table(parts[0].subplots(1, 2), settings["neurons"])
    if known:
        _draw_layers(parts[1].subplots(), known, settings)
    return figure


def _draw_table(panels: Sequence[Axes], d: int) -> None:
    groups = [g for g in range(1, d + 1) if d % g == 0]
    batches = [2**power for power in range(1, 13)]
    group_curves = {
        f"{method}, feasible for g <= {most_groups(d, whiten)}": [
            group_constraints(d, 1, g, whiten).ratio for g in groups
        ]
        for method, whiten in (("GN", False), ("GW", True))
    }
    batch_curves = {
        f"{method}, feasible for m >= {least_columns(side)}": [batch_constraints(d, m, side).ratio for m in batches]
        for method, side in (("BN", 1), ("BW", d))
    }
    for axes, places, curves in zip(panels, (groups, batches), (group_curves, batch_curves), strict=True):
        for label, ratios in curves.items():
            axes.plot(places, ratios, "o-", label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _mark_infeasible(axes, [ratio for ratios in curves.values() for ratio in ratios])
    panels[0].set(title=f"d = {d} neurons, per sample", xlabel="groups g")
    panels[1].set(title=f"d = {d} neurons, over the batch", xlabel="batch size m")


def _draw_layers(axes: Axes, layers: Sequence[tuple[NormShape, float]], settings: dict[str, Any]) -> None:
    colours = {"GW": "tab:orange", "BW": "tab:purple", "GN": "tab:blue", "LN": "tab:cyan"}
    kinds = [layer.spec.partition(":")[0] for layer, _ in layers]
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        ratios = [layers[place][1] for place in places]
        axes.plot(places, ratios, "o", color=colours.get(kind, "0.45"), label=kind)
    axes.set_xticks(range(len(layers)), [short_name(layer.layer) for layer, _ in layers], rotation=90, fontsize=7)
    axes.set_xlim(-1, len(layers))
    size = f"{settings['height']} x {settings['width']}"
    axes.set_title(f"Layers of the model, {settings['images']} images of {size} on a GPU")
    _mark_infeasible(axes, [ratio for _, ratio in layers])


def _mark_infeasible(axes: Axes, ratios: Sequence[float]) -> None:
    axes.axhline(1, color="tab:red", linewidth=1.2)
    axes.axhspan(1, 1e9, color="tab:red", alpha=0.08, label="infeasible")
    axes.set(yscale="log", ylim=(min(ratios) / 3, max(*ratios, 3) * 3), ylabel="constraints / variables")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
