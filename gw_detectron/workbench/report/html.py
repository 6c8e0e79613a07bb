"""Write a page of sections: one HTML file that contains its pictures."""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ...atomic import atomic_folder, write_json, write_text
from ...errors import printable
from ...installation import __version__
from .page_parts import Picture, Section

# Without scripts or references to other files, so that it can be sent around.
_HTML = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; overflow-wrap: anywhere; }
body { font: 16px/1.5 system-ui, sans-serif; }
h2 { margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid; font-size: 1.25rem; }
nav, .tables { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 0 2rem; }
a { color: inherit; }
.missing { padding: .75rem 1rem; border-left: 4px solid #d9822b; }
.row { display: grid; gap: .75rem; }
.row { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
figure { margin: .5rem 0; text-align: center; font-size: .85rem; }
img { max-width: 100%; background: #fff; }
.scroll { max-width: 100%; max-height: 32rem; margin: .75rem 0; overflow: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; text-align: right; }
th:first-child, td:first-child, .facts td { text-align: left; vertical-align: top; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<nav>{% for name in sections %}<a href="#{{ name | key }}">{{ name }}</a>{% endfor %}</nav>
{% for entry in missing %}
<p class="missing"><b>Missing: {{ entry.parts | join(", ") }}.</b> {{ entry.reason }}</p>
{% endfor %}
{% for name, section in sections.items() %}
<section id="{{ name | key }}">
<h2>{{ name }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% for row in section.pictures %}
<div class="row">
{% for picture in row %}
<figure><img alt="{{ picture.caption or name }}" src="{{ picture | uri }}">
{% if picture.caption %}<figcaption>{{ picture.caption }}</figcaption>{% endif %}</figure>
{% endfor %}
</div>
{% endfor %}
<div class="tables">
{% for table in section.tables %}
<div class="scroll{{ '' if table.header else ' facts' }}"><table>
{% if table.header %}<tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>
{% endif %}
{% for row in table.rows %}<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
</div>
</section>
{% endfor %}
<footer>Written by gw_detectron {{ version }}.</footer>
</body>
</html>
"""


def write_page(
    path: Path,
    title: str,
    sections: Mapping[str, Section],
    missing: Sequence[Mapping] = (),
) -> None:
    """Write a page atomically.

    Args:
        sections: heading -> section.
        missing: the ``parts`` that are missing, with the ``reason``.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, finalize=_shown)
    environment.filters |= {"key": section_key, "uri": _data_uri}
    page = environment.from_string(_HTML).render(
        title=title,
        sections=sections,
        missing=missing,
        version=__version__,
    )
    write_text(path, page)


def _data_uri(picture: Picture) -> str:
    content = base64.b64encode(picture.data).decode()
    return f"data:{picture.media};base64,{content}"


def _shown(value: Any) -> Any:
    """Return what the page shows of a value: no control characters, one decimal."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    return printable(value) if isinstance(value, str) else value


def write_folder(
    output: str | os.PathLike[str],
    files: tuple[str, str],
    title: str,
    sections: Mapping[str, Section],
    numbers: Mapping[str, Any],
) -> dict[str, Any]:
    """Write ``files``, the numbers as json and the page; return the numbers, with NaN as null."""
    data, page = files
    written = json.loads(json.dumps(numbers), parse_constant=lambda _: None)
    with atomic_folder(output, files) as place:
        write_page(place / page, title, sections, written.get("missing", ()))
        write_json(place / data, written)
    return written


def section_key(title: str) -> str:
    """Return a title as a key of ``report.json`` and an anchor of the page."""
    return title.lower().replace(" ", "_")
