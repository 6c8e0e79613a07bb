"""Render sections as one HTML page without scripts or references to other files."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ..installation import __version__

_LONGEST_SIDE = 960  # pixels of a photograph in the page


@dataclass(frozen=True)
class Picture:
    """A picture of a report: file name, content of the file, and a line below it."""

    file: str
    data: bytes
    caption: str = ""

    @classmethod
    def from_figure(cls, name: str, figure: Figure) -> "Picture":
        """Render a figure as PNG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return cls(f"{name}.png", buffer.getvalue())

    @classmethod
    def from_photo(cls, name: str, pixels: np.ndarray, caption: str) -> "Picture":
        """Encode (H, W, 3) uint8 RGB as JPEG, a tenth of a PNG, with a longer side of at most 960."""
        image = Image.fromarray(pixels)
        image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=88)
        return cls(f"{name}.jpg", buffer.getvalue(), caption)


@dataclass(frozen=True)
class Table:
    """A table; None in a cell is undefined, and floats have one decimal."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Args:
        numbers: its entry in ``report.json``, where NaN becomes null.
        text: a paragraph.
        cards: name -> value in large print.
        pictures: rows of pictures that stand side by side where the screen is wide enough.
        tables: below the pictures.
    """

    numbers: Any = None
    text: str = ""
    cards: Mapping[str, str] = field(default_factory=dict)
    pictures: Sequence[Sequence[Picture]] = ()
    tables: Sequence[Table] = ()


_CSS = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #60656d; --page: #fff; --card: #f4f5f7; --line: #d9dce1; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #9ba1a9; --page: #15181c; --card: #20242a; --line: #343a42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); font-size: 1.25rem; }
p, figcaption, th, nav, footer, .cards { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; }
a { color: inherit; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.cards div, .missing { padding: .75rem 1rem; border-radius: .35rem; background: var(--card); }
.cards b { display: block; font-size: 1.6rem; line-height: 1.2; color: var(--text); }
.missing { border-left: 4px solid #d9822b; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: .75rem; }
figure { margin: .5rem 0; }
img { display: block; max-width: 100%; margin: 0 auto; border-radius: .35rem; background: #fff; }
figcaption { font-size: .85rem; text-align: center; }
.tables { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 0 3rem; }
.scroll { max-width: 100%; max-height: 32rem; margin: .75rem 0; overflow: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th { position: sticky; top: 0; background: var(--page); font-weight: 500; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.facts td { text-align: left; vertical-align: top; }
footer { margin-top: 3rem; font-size: .85rem; }
"""


def section_key(title: str) -> str:
    """Return a title as a key of ``report.json`` and an anchor of the page."""
    return title.lower().replace(" ", "_")


def render_page(title: str, sections: Mapping[str, Section], missing: Iterable[Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        title: its heading.
        sections: by their headings, in order.
        missing: dicts of ``parts`` and ``reason`` for parts that are left out.
    """
    links = "".join(f'<a href="#{section_key(name)}">{escape(name)}</a>' for name in sections)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>",
            f"<h1>{escape(title)}</h1>\n<nav>{links}</nav>",
            *(
                f'<p class="missing"><b>Missing: {escape(", ".join(entry["parts"]))}.</b> {escape(entry["reason"])}</p>'
                for entry in missing
            ),
            *(_section(name, section) for name, section in sections.items()),
            f"<footer>Written by gw_detectron {escape(__version__)}.</footer>\n</body>\n</html>\n",
        ]
    )


def _section(title: str, section: Section) -> str:
    cards = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in section.cards.items())
    return "\n".join(
        [
            f'<section id="{section_key(title)}">\n<h2>{escape(title)}</h2>',
            f'<div class="cards">{cards}</div>' if cards else "",
            f"<p>{escape(section.text)}</p>" if section.text else "",
            *(f'<div class="row">{"".join(map(_picture, row))}</div>' for row in section.pictures),
            f'<div class="tables">{"".join(map(_table, section.tables))}</div>\n</section>',
        ]
    )


def _picture(picture: Picture) -> str:
    kind = "jpeg" if picture.file.endswith(".jpg") else "png"
    data = base64.b64encode(picture.data).decode()
    name = escape(picture.caption or picture.file, quote=True)
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    return f'<figure><img alt="{name}" src="data:image/{kind};base64,{data}">{caption}</figure>'


def _table(table: Table) -> str:
    facts = not any(table.header)
    head = "" if facts else f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in table.header)}</tr>"
    rows = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in table.rows)
    return f'<div class="scroll{" facts" if facts else ""}"><table>{head}{rows}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
