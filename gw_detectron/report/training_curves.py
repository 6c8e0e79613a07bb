"""Curves of a training: losses, learning rate and AP."""

from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.figure import Figure

from ..engine.evaluators import MAIN_SCORES
from .run_folder import RunFolder
from .sections import Picture, Section


def curves_section(run: RunFolder) -> Section:
    """Plot the losses, the learning rate and the AP of a run over its iterations."""
    records = run.metrics
    panels = {
        "losses": ("loss", _is_loss, ""),
        "learning_rate": ("learning rate", lambda name: name == "lr", ""),
        "evaluation": ("AP (%)", lambda name: name.rpartition("/")[2] in MAIN_SCORES, "o"),
    }
    pictures = [
        Picture.from_figure(f"curve_{name}", _plot(records, label, wanted, marker))
        for name, (label, wanted, marker) in panels.items()
    ]
    last = {name: value for record in records for name, value in record.items() if _is_loss(name)}
    return Section("Curves", {"last_losses": last}, pictures=[pictures])


def _is_loss(name: str) -> bool:
    return name.startswith("loss") or name == "total_loss"


def _plot(records: Iterable[dict[str, Any]], label: str, wanted: Callable[[str], bool], marker: str) -> Figure:
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.subplots()
    for name in sorted({name for record in records for name in record if wanted(name)}):
        points = [(record["iteration"], record[name]) for record in records if name in record]
        width = 2.2 if name == "total_loss" else 1.3
        axes.plot(*zip(*points, strict=True), marker=marker, linewidth=width, label=name)
    if axes.lines:
        axes.legend(fontsize="small")
    else:
        axes.text(0.5, 0.5, "none logged", ha="center", va="center", transform=axes.transAxes)
    axes.set(xlabel="iteration", ylabel=label, ylim=(0, 100 if "%" in label else None))
    axes.grid(alpha=0.3)
    return figure
