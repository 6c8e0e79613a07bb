"""Arrows between the rooms of the package point one way: tools, runs, components, layers, torch."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gw_detectron"

# each room may import the rooms of the rows above it
ROOMS = (
    {"layers", "config", "version"},
    {"modeling", "data", "env", "launch", "optimizer"},
    {"checkpoint", "model_zoo"},
    {"preflight", "cli", "hooks", "report", "export", "analysis", "benchmark"},
    {"engine"},
    {"demo"},
)
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
# rooms of one row that are steps of one thing
BESIDE = {("export", "cli"), ("model_zoo", "checkpoint")}


def imports(path: Path) -> set[str]:
    """The absolute names of the modules that a file imports, wherever in it."""
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


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def room(module: str) -> str:
    return module.split(".")[1] if module.startswith("gw_detectron.") else ""


@pytest.mark.parametrize("path", files(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_is_below_it(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):  # the public face, which nothing inside may import
        return
    own = parts[0]
    assert own in LEVELS, f"{own} is a new room: give it its place in this test"
    for module in imports(path):
        assert module != "gw_detectron", f"{path} imports the package's face instead of the room it means"
        other = room(module)
        if other and other != own:
            below = LEVELS[other] < LEVELS[own]
            assert below or (own, other) in BESIDE, f"{own} imports {other}, against the arrows"


@pytest.mark.parametrize("path", files(PACKAGE / "layers"), ids=lambda path: path.name)
def test_layers_know_torch_alone(path):
    outside = {module.split(".")[0] for module in imports(path)} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "triton", "gw_detectron"}


@pytest.mark.parametrize("path", files(ROOT / "tools"), ids=lambda path: path.name)
def test_tools_hold_no_logic_of_their_own(path):
    modules = {module.split(".")[0] for module in imports(path)}
    if "gw_detectron" in modules:
        assert not modules & {"torch", "detectron2"}, f"{path.name} should leave this to the package"


def test_detectron2_is_told_by_its_features_not_by_its_version():
    for path in files(PACKAGE):
        assert "detectron2.__version__" not in path.read_text(), path
