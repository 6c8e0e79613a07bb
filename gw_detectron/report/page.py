"""Render sections as one HTML page without scripts or references to other files."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..installation import __version__
from .sections import Picture, Section, Table

_CSS = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #60656d; --page: #fff; --card: #f4f5f7; --line: #d9dce1; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #9ba1a9; --page: #15181c; --card: #20242a; --line: #343a42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; -webkit-text-size-adjust: 100%; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); font-size: 1.25rem; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
p, figcaption, th, nav, footer { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; }
a { color: inherit; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.cards div { padding: .75rem 1rem; border-radius: .5rem; background: var(--card); }
.cards b { display: block; font-size: 1.6rem; line-height: 1.2; color: var(--text); }
.cards div, summary { color: var(--soft); }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: .75rem; }
figure { margin: .5rem 0; min-width: 0; }
img { display: block; max-width: 100%; margin: 0 auto; border-radius: .35rem; background: #fff; }
figcaption { font-size: .85rem; text-align: center; overflow-wrap: anywhere; }
.scroll { max-height: 32rem; margin: .75rem 0; overflow: auto; }
figure .scroll, .facts { max-height: none; }
figure .scroll { margin: 0; }
.tables { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 0 3rem; }
.tables .scroll { max-width: 100%; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th { position: sticky; top: 0; background: var(--page); font-weight: 500; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.facts td { text-align: left; overflow-wrap: anywhere; vertical-align: top; }
.missing { padding: .75rem 1rem; border-left: 4px solid #d9822b; border-radius: .35rem; background: var(--card); }
pre, code { font: .85rem/1.45 ui-monospace, monospace; }
code { overflow-wrap: anywhere; color: var(--text); }
pre { margin: .75rem 0; padding: .75rem; overflow: auto; border-radius: .35rem; background: var(--card); }
summary { cursor: pointer; }
footer { margin-top: 3rem; font-size: .85rem; }
"""


def render_page(title: str, sections: Sequence[Section], missing: Iterable[Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        title: its heading.
        sections: in order.
        missing: dicts of ``parts``, ``reason`` and ``command`` for parts that are left out.
    """
    links = "".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in sections)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>",
            f"<h1>{escape(title)}</h1>\n<nav>{links}</nav>",
            *map(_missing, missing),
            *map(_section, sections),
            f"<footer>Written by gw_detectron {escape(__version__)}.</footer>\n</body>\n</html>\n",
        ]
    )


def _missing(entry: Mapping[str, Any]) -> str:
    command = f"<br>Make it: <code>{escape(entry['command'])}</code>" if entry["command"] else ""
    parts = escape(", ".join(entry["parts"]))
    return f'<p class="missing"><b>Missing: {parts}.</b> {escape(entry["reason"])}{command}</p>'


def _section(section: Section) -> str:
    cards = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in section.cards.items())
    tables = "".join(map(_table, section.tables))
    details = (f'<div class="tables">{tables}</div>' if tables else "") + (
        f"<pre>{escape(section.code)}</pre>" if section.code else ""
    )
    return "\n".join(
        [
            f'<section id="{section.key}">\n<h2>{escape(section.title)}</h2>',
            f'<div class="cards">{cards}</div>' if cards else "",
            f"<p>{escape(section.text)}</p>" if section.text else "",
            *(f'<div class="row">{"".join(map(_picture, row))}</div>' for row in section.pictures),
            f"<details><summary>show</summary>{details}</details>" if section.folded else details,
            "</section>",
        ]
    )


def _picture(picture: Picture) -> str:
    kind = "jpeg" if picture.file.endswith(".jpg") else "png"
    data = base64.b64encode(picture.data).decode()
    name = escape(picture.caption or picture.file, quote=True)
    style = f' style="min-width: {picture.min_width}px"' if picture.min_width else ""
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    image = f'<img alt="{name}" src="data:image/{kind};base64,{data}"{style}>'
    return f'<figure><div class="scroll">{image}</div>{caption}</figure>'


def _table(table: Table) -> str:
    facts = not any(table.header)
    head = "" if facts else f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in table.header)}</tr>"
    rows = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in table.rows)
    return f'<div class="scroll{" facts" if facts else ""}"><table>{head}{rows}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
