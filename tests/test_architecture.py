"""Imports between the rooms of the package point one way."""

import ast
import sys
from pathlib import Path

import pytest

from .tiny_run import ROOT

PACKAGE = ROOT / "gw_detectron"

# A room may import the rooms of the rows above its own.
ROOMS = (
    {"errors"},
    {"atomic", "progress", "installation"},
    {"ops"},
    {"layers"},
    {"norms"},
    {"config", "cli"},
    {"modeling", "data", "env"},
    {"weights", "recipe"},
    {"checkpoint"},
    {"model_zoo"},
    {"export"},
    {"preflight", "prediction"},
    {"engine"},
    {"report"},
    {"comparison"},
    {"commands"},
    {"__main__"},
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def imports(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file imports, wherever in it."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {module} if node.module else {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", sorted(path.stem for path in PACKAGE.iterdir() if path.name[0] not in "_."))
def test_a_room_imports_only_rooms_below_it(room):
    if room == "py":  # py.typed
        return
    assert room in LEVELS, f"{room} is a new room: add it to ROOMS"
    for path in sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]:
        for module in imports(path):
            assert module != "gw_detectron", f"{path} imports the public names instead of the room that has them"
            other = module.split(".")[1] if module.startswith("gw_detectron.") else room
            assert other == room or LEVELS[other] < LEVELS[room], f"{path} imports {other}, against the arrows"


@pytest.mark.parametrize("room", ["ops", "layers"])
def test_ops_and_layers_import_only_torch(room):
    for path in (PACKAGE / room).rglob("*.py"):
        outside = {module.split(".")[0] for module in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= {"torch", "triton", "gw_detectron"}, path
