"""Every error of the package says what to do, and docs/troubleshooting.md has its class."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import gw_detectron
from gw_detectron import errors
from gw_detectron.errors import UserError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FILES = sorted((ROOT / "gw_detectron").rglob("*.py"))
# Not for users: the protocol of attributes, and exits after a message.
INTERNAL = {"AttributeError", "SystemExit", "Interrupted"}


# Reasons that another module puts into a message, with that module and its fix.
COMPLETED = {
    "catalog": ("weights/download.py", "Fix: "),
    "coco_checks": ("preflight/dataset_checks.py", "Fix: correct the file."),
    "derived_json": ("data/derived_json.py", "not compressed."),  # repeats an error with the name of the file
    "opening": ("weights/reading.py", "Fix:"),  # repeats an error with the name of the key
    "config": ("config.py", "Fix: correct it."),
    "convs": ("layers/weight_standardization.py", "Fix:"),
    "findings": ("errors.py", "problems: one message per problem"),  # each has its own fix
    "images": ("data/images.py", "cannot be read: {reason}. Fix: repair"),
    "loading": ("checkpoint/loading.py", "Fix:"),
    "nonfinite": ("engine/nonfinite.py", "Fix:"),
    "names": ("norms/names.py", "Fix:"),
    "numpy_unpickler": ("weights/reading.py", "was not read: {error}. Fix:"),
    "pickle_check": ("weights/reading.py", "was not read: {error}. Fix:"),
    "provenance": ("weights/provenance.py", "damaged ({reason}). Fix: convert the weights again."),
    "reading": ("weights/reading.py", "was not read: {error}. Fix:"),
    "run_folder": ("errors.py", "Fix: run `{command}`."),
    "table": ("benchmarks/table.py", "Fix: measure it again."),
    "trainer": ("engine/nonfinite.py", "Fix:"),
    "weights_io": ("weights/conversion.py", "Fix:"),  # repeats an error with the name of the file
    "whitening_statistics": ("analysis/layer_analysis.py", "Fix:"),
}


def constants() -> dict[str, str]:
    """Return the fixed parts of everything that the package assigns to a name or returns from a function."""
    found: dict[str, str] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign):
                for name in (name.id for target in node.targets for name in ast.walk(target) if hasattr(name, "id")):
                    found[name] = found.get(name, "") + texts(node.value)
            elif isinstance(node, ast.FunctionDef):
                returned = [texts(part) for part in ast.walk(node) if isinstance(part, ast.Return)]
                found[node.name] = found.get(node.name, "") + " ".join(returned)
    return found


def texts(node: ast.AST) -> str:
    """Join the fixed parts of an expression."""
    return " ".join(part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and type(part.value) is str)


CONSTANTS = constants()


def errors_without_cure(path: Path) -> list[str]:
    """Return line and fixed text of the errors that do not say what to do."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
            continue
        used = {part.id for part in ast.walk(node.exc) if isinstance(part, ast.Name)}
        text = texts(node.exc) + "".join(CONSTANTS.get(name, "") for name in used)
        if ast.unparse(node.exc.func) not in INTERNAL and "Fix:" not in text:
            found.append(f"line {node.lineno}: {texts(node.exc)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_error_says_what_to_do(path):
    missing = errors_without_cure(path)
    if missing and path.stem in COMPLETED:
        module, fix = COMPLETED[path.stem]
        assert fix in (ROOT / "gw_detectron" / module).read_text()
    else:
        assert not missing


def error_classes() -> list[str]:
    for module in pkgutil.walk_packages(gw_detectron.__path__, "gw_detectron."):
        if ".triton" not in module.name and not module.name.endswith("needs_detectron2"):
            importlib.import_module(module.name)
    found, waiting = set(), [UserError]
    while waiting:
        waiting += (new := waiting.pop()).__subclasses__()
        if inspect.getmodule(new).__name__.startswith("gw_detectron"):
            found.add(new.__name__)
    return sorted(found)


@pytest.mark.parametrize("name", error_classes())
def test_every_class_of_user_errors_is_on_the_page(name):
    assert f"`{name}`" in PAGE and hasattr(errors, name)
