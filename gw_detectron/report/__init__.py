"""Reports of a run: scores, curves and pictures of errors on one page."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import jinja2
from matplotlib import rc_context

from ..atomic import atomic_folder
from ..errors import is_user_error
from ..installation import __version__, require_packages
from ..progress import progress_bar
from .run_folder import RunFolder
from .sections import SECTIONS, Section

__all__ = ["NUMBERS", "PAGE", "RunFolder", "write_report"]

PAGE, NUMBERS = "report.html", "report.json"

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
body { margin: 0 auto; padding: 1rem; max-width: 72rem; font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid; font-size: 1.25rem; }
nav, .tables { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 0 2rem; }
a { color: inherit; }
.missing { padding: .75rem 1rem; border-left: 4px solid #d9822b; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: .75rem; }
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
<figure><img alt="{{ picture.caption or picture.file }}" src="{{ picture | uri }}">
{% if picture.caption %}<figcaption>{{ picture.caption }}</figcaption>{% endif %}</figure>
{% endfor %}
</div>
{% endfor %}
<div class="tables">
{% for table in section.tables %}
<div class="scroll{{ '' if table.header else ' facts' }}"><table>
{% if table.header %}<tr>{% for name in table.header %}<th>{{ name }}</th>{% endfor %}</tr>{% endif %}
{% for row in table.rows %}<tr>{% for value in row %}<td>{{ value | cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
</div>
</section>
{% endfor %}
<footer>Written by gw_detectron {{ version }}.</footer>
</body>
</html>
"""


def write_report(
    folder: str | os.PathLike[str],
    *,
    images: int = 4,
    score: float = 0.5,
    output: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Write ``report.html``, which contains its pictures, and ``report.json``.

    Args:
        folder: ``OUTPUT_DIR`` of a run.
        images, score: what the report shows, see :class:`RunFolder`.
        output: the folder to write; ``report`` in the run folder if None. An earlier report there is replaced.

    Returns:
        The content of ``report.json``. ``missing`` lists the parts whose input the run folder lacks, and why.

    Raises:
        MissingFileError: the folder holds no run.
        ConfigError: its config cannot be used, or ``images`` or ``score`` is out of range.
        FileAccessError: ``output`` holds other files.
        MissingPackageError: OpenCV is not installed.
    """
    require_packages("report", "cv2")  # before minutes of work
    run = RunFolder(folder, images, score)
    output = run.folder / "report" if output is None else Path(output)
    sections: dict[str, Section] = {}
    reasons: dict[str, list[str]] = {}
    for name, section in progress_bar(SECTIONS.items(), desc="report", unit="part"):
        try:
            with rc_context({"text.parse_math": False}):  # class names may have dollar signs
                sections[name] = section(run)
        except Exception as error:
            if not is_user_error(error):
                raise
            reasons.setdefault(str(error), []).append(name)
    missing = [{"parts": parts, "reason": reason} for reason, parts in reasons.items()]
    numbers = {_key(name): each.numbers for name, each in sections.items() if each.numbers is not None}
    numbers["missing"] = missing
    numbers = json.loads(json.dumps(numbers), parse_constant=lambda _: None)  # JSON has no NaN
    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.filters |= {
        "key": _key,
        "uri": lambda picture: f"data:{picture.media};base64,{base64.b64encode(picture.data).decode()}",
        "cell": lambda value: "-" if value is None else f"{value:.1f}" if isinstance(value, float) else value,
    }
    title = f"Run {run.folder.resolve().name}"
    page = environment.from_string(_HTML).render(title=title, sections=sections, missing=missing, version=__version__)
    with atomic_folder(output, [PAGE, NUMBERS]) as place:
        (place / PAGE).write_text(page, encoding="utf-8")
        (place / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
    return numbers


def _key(title: str) -> str:
    """Return a title as a key of ``report.json`` and an anchor of the page."""
    return title.lower().replace(" ", "_")
