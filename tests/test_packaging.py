"""The wheel holds all code and configs and works where only its requirements are; all requirements are locked."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import detectron2
import install_detectron2
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gw_detectron
from gw_detectron.config import list_configs

from .tiny_run import ROOT

# This environment's libraries: as PYTHONPATH they serve a second interpreter, without the editable install.
LIBRARIES = os.pathsep.join(
    str(Path(module.__file__).parent.parent) for module in (torch, detectron2)
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that neither a leftover build/ nor a parallel build plays a part."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("gw_detectron", "configs", "examples"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "--wheel-dir",
        str(out),
    ]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (file,) = out.glob("*.whl")
    return file


@pytest.mark.slow
def test_the_wheel_holds_all_code_and_all_configs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = importlib.metadata.PathDistribution(
            zipfile.Path(archive, name.removesuffix("METADATA"))
        )
        assert metadata.version == gw_detectron.__version__
        assert any(path.endswith("licenses/LICENSE") for path in archive.namelist())
        # the registries have no project of this name that is Detectron2
        assert "detectron2" not in {
            canonicalize_name(Requirement(line).name) for line in metadata.requires or []
        }
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gw_detectron").rglob("*.py")}
    configs = {
        path for path in (ROOT / "configs").rglob("*.*") if path.suffix in (".yaml", ".py")
    }
    assert files == code | {f"gw_detectron/{path.relative_to(ROOT)}" for path in configs} | {
        "gw_detectron/py.typed"
    }


@pytest.mark.slow
def test_an_installed_wheel_registers_the_components_and_serves_the_configs(wheel, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    install = [
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    code = """
import gw_detectron
from detectron2.config import LazyConfig
from gw_detectron.config import list_configs, read_config, shipped_configs
from detectron2.modeling import BACKBONE_REGISTRY, ROI_BOX_HEAD_REGISTRY, ROI_MASK_HEAD_REGISTRY
for name in "resnet", "resnet_fpn", "retinanet_resnet_fpn":
    BACKBONE_REGISTRY.get(f"build_gw_{name}_backbone")
ROI_BOX_HEAD_REGISTRY.get("GWFastRCNNConvFCHead")
ROI_MASK_HEAD_REGISTRY.get("GWMaskRCNNConvUpsampleHead")
for name in list_configs():
    file = shipped_configs()[name]
    assert file.is_relative_to(gw_detectron.__path__[0]), file
    if name.endswith(".py"):
        LazyConfig.load(str(file))
    else:
        assert read_config(name).VERSION == 2
print(gw_detectron.__file__, len(list_configs()))
"""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(python), "-c", code],
        cwd=tmp_path,
        env=inherited | {"PYTHONPATH": LIBRARIES},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    where, count = result.stdout.split()
    assert (
        Path(where).is_relative_to(tmp_path / "venv") and int(count) == len(list_configs()) > 0
    )


def imports(tree: ast.AST) -> set[str]:
    """The first parts of the names of all modules that are imported, except relative ones."""
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [
        node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level
    ]
    return (
        {name.partition(".")[0] for name in names}
        - {"gw_detectron", "detectron2"}
        - sys.stdlib_module_names
    )


def requirements(name: str) -> set[str]:
    """Return what a distribution requires without extras, and what those require in turn."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for requirement in map(Requirement, importlib.metadata.requires(pending.pop()) or []):
            needed = canonicalize_name(requirement.name)
            if needed not in found and (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ):
                found.add(needed)
                pending.append(needed)
    return found


def test_everything_that_setup_installs_is_locked_with_hashes():
    locked = {}
    for line in re.sub(
        r"\\\n", "", re.sub(r"(?m)^#.*\n", "", (ROOT / "requirements.txt").read_text())
    ).splitlines():
        text, *hashes = line.split("--hash=sha256:")
        requirement = Requirement(text)
        (pin,) = requirement.specifier
        assert (
            pin.operator == "=="
            and hashes
            and all(re.fullmatch("[0-9a-f]{64} *", digest) for digest in hashes)
        ), line
        if requirement.marker is None or requirement.marker.evaluate():
            locked[canonicalize_name(requirement.name)] = pin.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        line
        for extra, lines in project["optional-dependencies"].items()
        for line in lines
        if extra != "tiles"
    ]
    wanted = [
        *project["dependencies"],
        *extras,
        *install_detectron2.DEPENDENCIES,
        "pip<=26.0",
        "setuptools>=77",
    ]
    fits = {
        line: Requirement(line).specifier.contains(
            locked.get(canonicalize_name(Requirement(line).name), "0")
        )
        for line in wanted
        if not line.startswith("gw-detectron")
    }
    needed = (
        requirements("torch")
        | requirements("detectron2")
        | requirements("gw-detectron")
        | requirements("pytest")
    )
    assert all(fits.values()) and needed <= set(locked), (
        "run `make lock`",
        fits,
        needed - set(locked),
    )


def test_every_imported_library_is_declared():
    optional = {
        canonicalize_name(Requirement(line).name)
        for line in importlib.metadata.requires("gw-detectron") or []
    }
    required = requirements("gw-detectron") | requirements("detectron2")
    providers = importlib.metadata.packages_distributions()
    undeclared = []
    for file in (ROOT / "gw_detectron").rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        # What only a function imports may be optional; what is tried, with an answer to its absence, need not be there.
        in_functions = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for name in imports(node)
        }
        tried = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for name in imports(node)
        }
        for name in set(imports(tree)) - tried:
            allowed = required | (optional if name in in_functions else set())
            if allowed.isdisjoint(
                map(canonicalize_name, providers.get(name, [name]))
            ):  # an extra need not be there
                undeclared.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not undeclared, "add to pyproject.toml"
