"""Messages and commands that pages and code quote exist."""

import ast
import re

import pytest

from gw_detectron import errors
from gw_detectron.workbench.commands import COMMANDS

from .pages import PAGES, ROOT, read

SOURCES = {path: ast.parse(path.read_text()) for path in ROOT.glob("gw_detectron/**/*.py")}
TEXTS = [
    "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.JoinedStr)
    else node.value
    for tree in SOURCES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.JoinedStr)
    or (isinstance(node, ast.Constant) and isinstance(node.value, str))
]
#: of PyYAML, which a refused config shows
NOT_OURS = {"could not determine a constructor for the tag"}


def quoted_messages():
    """Messages of this package in the first column: those without D, T or the name of a program."""
    for line in (
        read("docs/troubleshooting.md").partition("## Errors in Python")[0].splitlines()
    ):
        first = line.split("|")[1] if line.startswith("| ") else ""
        if not re.match(r" (D |T |AP |`pip`|`Killed`)", first):
            yield from re.findall(r"(?<![DT] )`([^`]+)`", re.sub(r"\b[DT] `.*", "", first))


@pytest.mark.parametrize("message", sorted(set(quoted_messages()) - NOT_OURS))
def test_a_quoted_message_is_in_the_code(message):
    assert any(message in text for text in TEXTS)


def test_every_named_command_exists():
    texts = [*TEXTS, *map(read, PAGES)]
    named = {name for text in texts for name in re.findall(r"gw-detectron ([a-z]+)", text)}
    assert len(named) > 5 and named <= COMMANDS.keys()


def test_every_class_of_errors_is_listed_with_its_base():
    listed = dict(
        re.findall(
            r"^\| `(\w+)` \| `(\w+)` \|", read("docs/troubleshooting.md"), flags=re.MULTILINE
        )
    )
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and name != "UserError"
    }
    ours = {
        name: value for name, value in classes.items() if issubclass(value, errors.UserError)
    }
    assert listed.keys() == ours.keys()
    for name, base in listed.items():
        assert base in {each.__name__ for each in ours[name].__mro__}, name
