"""Parts of a report: text, tables and pictures."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

_LONGEST_SIDE = 960  # pixels of a photograph in the page


@dataclass(frozen=True)
class Picture:
    """A picture of a report.

    Args:
        file: its name, which ends in ``.png`` or ``.jpg``.
        data: the content of the file.
        caption: a line below the picture.
        min_width: CSS pixels below which it is scrolled instead of shrunk.
    """

    file: str
    data: bytes
    caption: str = ""
    min_width: int = 0

    @classmethod
    def from_figure(cls, name: str, figure: Figure, caption: str = "", min_width: int = 0) -> "Picture":
        """Render a figure as PNG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return cls(f"{name}.png", buffer.getvalue(), caption, min_width)

    @classmethod
    def from_photo(cls, name: str, pixels: np.ndarray, caption: str = "") -> "Picture":
        """Encode (H, W, 3) uint8 RGB as JPEG, reduced to a longer side of 960.

        A PNG of a photograph is about ten times as large.
        """
        image = Image.fromarray(pixels)
        image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=88)
        return cls(f"{name}.jpg", buffer.getvalue(), caption)

    def pixels(self) -> np.ndarray:
        """Return (H, W, 3) uint8 RGB."""
        return np.asarray(Image.open(io.BytesIO(self.data)).convert("RGB"))


@dataclass(frozen=True)
class Table:
    """A table; None in a cell is undefined, and floats have one decimal."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Args:
        title: its heading.
        numbers: its entry in ``report.json``, where NaN becomes null.
        text: a paragraph.
        cards: name -> value in large print.
        tables: below the pictures.
        pictures: rows of pictures that stand side by side where the screen is wide enough.
        code: preformatted text.
        folded: show the tables and ``code`` on request.
    """

    title: str
    numbers: Any
    text: str = ""
    cards: dict[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    pictures: Sequence[Sequence[Picture]] = ()
    code: str = ""
    folded: bool = False

    @property
    def key(self) -> str:
        """The title as a key of ``report.json``."""
        return self.title.lower().replace("-", " ").replace(" ", "_")

    def all_pictures(self) -> list[Picture]:
        return [picture for row in self.pictures for picture in row]
