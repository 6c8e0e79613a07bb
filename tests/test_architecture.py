"""Imports between the rooms of the package point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from .tiny_run import ROOT

PACKAGE = ROOT / "gw_detectron"

# A room may import the rooms of the rows above its own. The method and the plugin do not import the workbench.
ROOMS = (
    ("errors",),
    ("atomic", "installation"),
    ("ops",),
    ("layers",),
    ("norms",),
    ("config",),
    ("modeling", "env"),
    ("weights",),
    ("workbench.signals",),
    ("workbench.console",),
    ("workbench.images",),
    ("workbench.dataset",),
    ("workbench.run",),
    ("workbench.predict", "workbench.export"),
    ("workbench.report",),
    ("workbench.compare",),
    ("workbench.commands",),
    ("__main__",),
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
            base = (
                ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            )
            module = ".".join(part for part in (base, node.module) if part)
            names |= (
                {module}
                if node.module
                else {f"{module}.{alias.name}" for alias in node.names}
            )
    return names


def room_of(module: str) -> str:
    """Return the room of a module of the package: a part of the workbench is a room of its own."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "workbench" else parts[0]


FILES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"
]


@pytest.mark.parametrize(
    "path",
    FILES,
    ids=lambda path: path.relative_to(PACKAGE).as_posix().removesuffix(".py"),
)
def test_a_room_imports_only_rooms_below_it(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    )
    room = room_of(module)
    if room == "workbench":  # its public names, found lazily
        return
    assert room in LEVELS, f"{room} is a new room: add it to ROOMS"

    for imported in imports(path):
        if imported.split(".")[0] != "gw_detectron":
            continue
        assert imported not in ("gw_detectron", "gw_detectron.workbench"), (
            f"{path} imports the public names instead of the room that has them"
        )
        other = room_of(imported)
        assert other == room or LEVELS[other] < LEVELS[room], (
            f"{path} imports {imported}, against the arrows"
        )


def test_importing_the_package_loads_no_workbench():
    code = (
        "import sys, gw_detectron; print([m for m in sys.modules if '.workbench' in m])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ["ops", "layers"])
def test_ops_and_layers_import_only_torch(room):
    for path in (PACKAGE / room).rglob("*.py"):
        outside = {module.split(".")[0] for module in imports(path)} - set(
            sys.stdlib_module_names
        )
        assert outside <= {"torch", "triton", "gw_detectron"}, path
