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
    return re.findall(
        rf"^```{language}\n(.*?)^```", read(page), flags=re.DOTALL | re.MULTILINE
    )


def commands(page: str) -> list[list[str]]:
    """Return the words of every command in bash blocks; variables that a block sets are replaced."""
    return [command for block in blocks(page, "bash") for command in _commands(block)]


def inline_commands(page: str) -> list[list[str]]:
    """Return the words of every command that stands in the text, as in `make test`."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    programs = "|".join(PROGRAMS)
    spans = re.findall(rf"(?<!`)`((?:{programs})\s[^`]+)`", text)
    script = "\n".join(span.replace("\n", " ") for span in spans)
    return list(_commands(script))


def _commands(script: str) -> Iterator[list[str]]:
    variables: dict[str, str] = {}
    for line in script.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        assignment = re.fullmatch(r"([A-Z]+)=(\S+)", line)
        if assignment:
            name, value = assignment.groups()
            variables[name] = value
            continue

        for command in line.split(" && "):
            words = shlex.split(command, comments=True)
            if words:
                yield words
