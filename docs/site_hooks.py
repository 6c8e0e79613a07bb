"""Hooks of the documentation site: pages from outside of docs/, formulas, and roles in docstrings."""

import html
import json
import re
import textwrap
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "benchmarks/*.md", "experiments/*.md")
LINKED = (
    "configs/**/*.*",
    "experiments/[!_]*/*.*",
    "experiments/[!_]*/[!_]*/*.*",
    "CITATION.cff",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and linked files of the repository, the notebook as a page, and a page for each API module."""
    for pattern in (*PAGES, *LINKED):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(
                File(name, str(ROOT), config.site_dir, config.use_directory_urls)
            )
    files.append(
        File.generated(
            config,
            "quickstart.md",
            content=_notebook_page(ROOT / "docs" / "quickstart.ipynb"),
        )
    )
    for module in re.findall(r"api/([\w.]+)\.md", json.dumps(config.nav)):
        files.append(
            File.generated(
                config, f"api/{module}.md", content=f"# {module}\n\n::: {module}\n"
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links point into the site, where docs/ and the repository's root are one folder."""
    if (ROOT / "docs" / page.file.src_uri).exists():
        return markdown.replace("](../", "](")
    return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)


def on_page_content(content: str, **_: object) -> str:
    """Write formulas as MathML, which browsers draw without scripts."""
    content = re.sub(
        r"\\\((.+?)\\\)",
        lambda found: convert(html.unescape(found[1])),
        content,
        flags=re.DOTALL,
    )
    return re.sub(
        r"\\\[(.+?)\\\]",
        lambda found: convert(html.unescape(found[1]), display="block"),
        content,
        flags=re.DOTALL,
    )


def _notebook_page(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else source
        )
    return "\n\n".join([*parts, f"[Download this notebook]({path.name})"])


def _fenced(found: re.Match[str]) -> str:
    return f"```{found[1]}\n{textwrap.dedent(found[2])}\n```"


class PlainRoles(griffe.Extension):
    """Write Sphinx roles and directives of docstrings as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            text = re.sub(
                r"\.\. math::\s*((?:.+\n)*.+)", r"$$\n\1\n$$\n", obj.docstring.value
            )
            text = re.sub(
                r"\.\. code-block:: (\w+)\n\n((?:    .*\n|\n)*    .*)", _fenced, text
            )
            text = re.sub(r"\.\. (warning|note)::", r"!!! \1\n", text)
            text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
            obj.docstring.value = re.sub(r":\w+:`[~.]*([^`]+)`", r"`\1`", text)
