"""Messages, commands and source files that pages and code name exist."""

import ast
import inspect
import re

import pytest

from gw_detectron import errors
from gw_detectron.workbench.commands import COMMANDS

from .pages import PAGES, ROOT, read

SOURCES = {
    path: ast.parse(path.read_text()) for path in ROOT.glob("gw_detectron/**/*.py")
}
TEXTS = [
    "".join(
        part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
    )
    if isinstance(node, ast.JoinedStr)
    else node.value
    for tree in SOURCES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.JoinedStr)
    or (isinstance(node, ast.Constant) and isinstance(node.value, str))
]
#: of PyYAML, which a refused config shows
NOT_OURS = {"could not determine a constructor for the tag"}
#: of Detectron2
THEIR_FILES = {"datasets/prepare_panoptic_fpn.py"}
#: with files that pages name
FOLDERS = ("gw_detectron", "tests", "tools", "examples", "experiments", "benchmarks")


def quoted_messages():
    """Messages of this package in the first column: those without D, T or the name of a program."""
    page, _, _ = read("docs/troubleshooting.md").partition("## Errors in Python")
    for first in re.findall(r"^\|( .*?)\|", page, flags=re.MULTILINE):
        if not re.match(r" (D |T |AP |`pip`|`Killed`)", first):
            ours = re.sub(r"\b[DT] `.*", "", first)
            yield from re.findall(r"(?<![DT] )`([^`]+)`", ours)


@pytest.mark.parametrize("message", sorted(set(quoted_messages()) - NOT_OURS))
def test_a_quoted_message_is_in_the_code(message):
    assert any(message in text for text in TEXTS)


def test_every_named_command_exists():
    text = "\n".join([*TEXTS, *map(read, PAGES)])
    named = set(re.findall(r"gw-detectron ([a-z]+)", text))
    assert named <= COMMANDS.keys()


def test_every_named_source_file_exists():
    files = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")]
    text = "\n".join(map(read, PAGES))
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)\b", text))

    missing = [name for name in named if not any(path.match(name) for path in files)]
    assert set(missing) == THEIR_FILES


def test_every_class_of_errors_is_listed_with_its_base():
    page = read("docs/troubleshooting.md")
    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, flags=re.MULTILINE))

    ours = set()
    for name, value in vars(errors).items():
        if inspect.isclass(value) and errors.UserError in value.__mro__[1:]:
            ours.add(name)
            assert listed[name] in [base.__name__ for base in value.__mro__]
    assert listed.keys() == ours
