"""The layout of the package: imports point one way."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gw_detectron"

# A room may import the rooms of the rows above its own.
ROOMS = (
    {"errors", "version"},
    {"atomic", "progress", "requirements", "shipped_configs"},
    {"needs_detectron2"},
    {"ops"},
    {"layers"},
    {"norms"},
    {"config", "cli", "installation", "timm_models"},
    {"modeling", "data", "pictures", "env"},
    {"weights"},
    {"checkpoint"},
    {"model_zoo"},
    {"analysis", "export"},
    {"preflight", "prediction"},
    {"engine"},
    {"report"},
    {"demo"},
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


def files(*folders: Path) -> list[Path]:
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def room(module: str) -> str:
    return module.split(".")[1] if module.startswith("gw_detectron.") else ""


@pytest.mark.parametrize("path", files(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_below_it(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":  # the public names, which nothing inside imports
        return
    assert own in LEVELS, f"{own} is a new room: add it to ROOMS"
    for module in imports(path):
        assert module != "gw_detectron", f"{path} imports the public names instead of the room that has them"
        other = room(module)
        if other and other != own:
            assert LEVELS[other] < LEVELS[own], f"{own} imports {other}, against the arrows"


@pytest.mark.parametrize("path", files(PACKAGE / "ops", PACKAGE / "layers"), ids=lambda path: path.stem)
def test_ops_and_layers_import_torch_alone(path):
    outside = {module.split(".")[0] for module in imports(path)} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "triton", "gw_detectron"}


@pytest.mark.parametrize("path", files(ROOT / "tools"), ids=lambda path: path.name)
def test_tools_parse_call_and_print(path):
    modules = {module.split(".")[0] for module in imports(path)}
    if "gw_detectron" in modules:
        assert not modules & {"torch", "detectron2"}, f"{path.name}: move this logic into the package"


def test_detectron2_is_recognized_by_features_not_by_version():
    for path in files(PACKAGE):
        assert "detectron2.__version__" not in path.read_text(), path
