"""Parts of a page: pictures, tables and sections; line plots."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

_LONGEST_SIDE = 960  # pixels of a photo in the page


@dataclass(frozen=True)
class Picture:
    """A picture of a report: the content of a file, its media type, and a line below it."""

    data: bytes
    media: str
    caption: str = ""

    @classmethod
    def from_figure(cls, figure: Figure) -> "Picture":
        """Render a figure as PNG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return cls(buffer.getvalue(), "image/png")

    @classmethod
    def from_photo(cls, pixels: np.ndarray, caption: str) -> "Picture":
        """Encode (H, W, 3) uint8 RGB as JPEG, a tenth of a PNG; its longer side is at most 960."""
        image = Image.fromarray(pixels)
        image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=88)
        return cls(buffer.getvalue(), "image/jpeg", caption)


@dataclass(frozen=True)
class Table:
    """A table, without a header a list of facts.

    None in a cell is undefined, and floats have one decimal.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "Table":
        """Make a table of rows by column; a row may lack columns."""
        header = list(dict.fromkeys(name for row in rows for name in row))
        return cls(header, [[row.get(name) for name in header] for row in rows])


@dataclass(frozen=True)
class Section:
    """A part of a report: a paragraph, rows of pictures and, below them, tables."""

    numbers: Any = None  # its entry in report.json, where NaN becomes null
    text: str = ""
    pictures: Sequence[Sequence[Picture]] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Line:
    """A line of a plot: its points, its text in the legend, and matplotlib's style."""

    points: Sequence[tuple[float, float]]
    label: str = ""
    style: Mapping[str, Any] = field(default_factory=dict)


def make_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure of a size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def plot_lines(
    lines: Iterable[Line], *, best: int | None = None, **settings: Any
) -> Picture:
    """Plot lines with a legend, and a dotted one at the ``best`` iteration.

    The axes begin at 0, which a single point would not show. ``settings``, such as ``xlabel``, go to
    ``Axes.set``.
    """
    figure, axes = make_axes(5.5, 3.8)
    for line in lines:
        style = {"marker": ".", "markersize": 4, **line.style}
        axes.plot(*zip(*line.points, strict=True), label=line.label, **style)

    if axes.lines:
        if best:
            axes.axvline(best, color="gray", linestyle=":", label="best")
        axes.legend(fontsize="small")
    else:
        axes.text(
            0.5, 0.5, "none logged", ha="center", va="center", transform=axes.transAxes
        )

    axes.set(**{"xlim": (0, None), "ylim": (0, None), **settings})
    return Picture.from_figure(figure)
