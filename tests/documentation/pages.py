"""Pages of the documentation, their code blocks and their command lines."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: every page that describes the code as it is now, so not the changelog
PLACES = ("*.md", "docs/*.md", "benchmarks/*.md", "experiments/**/*.md")
PAGES = sorted(
    {str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place)}
    - {"CHANGELOG.md"}
)
PROGRAMS = ("python", "torchrun", "gw-detectron", "make", "pip", "pytest", "bash")


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    """Return the words of every command in bash blocks; variables that a block sets are replaced."""
    return [command for block in blocks(page, "bash") for command in _commands(block)]


def inline_commands(page: str) -> list[list[str]]:
    """Return the words of every command that stands in the text, as in `make test`."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(rf"(?<!`)`((?:{'|'.join(PROGRAMS)})\s[^`]+)`", text)
    return [command for span in spans for command in _commands(span.replace("\n", " "))]


def _commands(script: str) -> Iterator[list[str]]:
    variables: dict[str, str] = {}
    for line in script.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        if len(words) == 1 and (assignment := re.fullmatch(r"([A-Z]+)=(.+)", words[0])):
            variables[assignment[1]] = assignment[2]
            continue
        while "&&" in words:
            end = words.index("&&")
            yield words[:end]
            words = words[end + 1 :]
        if words:
            yield words
