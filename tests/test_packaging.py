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
from gw_detectron.config import list_configs, shipped_configs

from .tiny_run import ROOT

# This environment's libraries: as PYTHONPATH they serve a second interpreter, without the editable install.
LIBRARIES = os.pathsep.join(
    str(Path(module.__file__).parent.parent) for module in (torch, detectron2)
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that neither a leftover build/ nor a parallel build plays a part."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    no_caches = shutil.ignore_patterns("__pycache__")
    for name in ("gw_detectron", "configs", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=no_caches)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)

    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
        str(source),
    )
    (file,) = out.glob("*.whl")
    return file


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *words, "--no-index"]
    subprocess.run(command, check=True)


@pytest.mark.slow
def test_the_wheel_holds_all_code_and_all_configs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = importlib.metadata.PathDistribution(
            zipfile.Path(archive, f"{folder}/")
        )
        required = {
            canonicalize_name(Requirement(line).name) for line in metadata.requires
        }
        version = metadata.version
    files = {name for name in names if not name.startswith(folder)}

    code = {path.relative_to(ROOT) for path in (ROOT / "gw_detectron").rglob("*.py")}
    configs = {Path("gw_detectron", "configs", name) for name in shipped_configs()}
    datasets = Path("gw_detectron", "configs", "quick_schedules", "datasets.yaml")
    expected = code | configs | {datasets, Path("gw_detectron/py.typed")}
    assert files == {path.as_posix() for path in expected}
    assert version == gw_detectron.__version__
    assert f"{folder}/licenses/LICENSE" in names
    # the registries have no project of this name that is Detectron2
    assert "detectron2" not in required


@pytest.mark.slow
def test_an_installed_wheel_registers_the_components_and_serves_the_configs(
    wheel, tmp_path
):
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")],
        check=True,
    )
    pip("--python", str(python), "install", "--no-deps", str(wheel))
    code = """
import gw_detectron
from detectron2.config import LazyConfig
from gw_detectron.config import list_configs, shipped_configs, read_config, shipped_configs
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
    result = subprocess.run(
        [str(python), "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": LIBRARIES},
        capture_output=True,
        text=True,
    )

    assert result.returncode == 0, result.stderr
    where, count = result.stdout.split()
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert int(count) == len(list_configs())


def imports(tree: ast.AST) -> set[str]:
    """The first parts of the names of all modules that are imported, except relative ones."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)

    libraries = {name.partition(".")[0] for name in names}
    return libraries - {"gw_detectron", "detectron2"} - sys.stdlib_module_names


def imports_inside(tree: ast.AST, kind: type[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, kind):
            names |= imports(node)
    return names


def requirements(name: str) -> set[str]:
    """Return what a distribution requires without extras, and what those require in turn."""
    needed: set[str] = set()
    pending = [name]
    while pending:
        lines = importlib.metadata.requires(pending.pop()) or []
        for requirement in map(Requirement, lines):
            library = canonicalize_name(requirement.name)
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"extra": ""})
            if applies and library not in needed:
                needed.add(library)
                pending.append(library)
    return needed


def locked_versions() -> dict[str, str]:
    """Return the versions in requirements.txt, each with its hashes."""
    text = (ROOT / "requirements.txt").read_text()
    text = re.sub(r"(?m)^#.*\n", "", text)
    versions = {}
    for line in text.replace("\\\n", "").splitlines():
        words, *hashes = line.split("--hash=sha256:")
        assert hashes, line
        for digest in hashes:
            assert re.fullmatch("[0-9a-f]{64} *", digest), line

        requirement = Requirement(words)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        if requirement.marker is None or requirement.marker.evaluate():
            versions[canonicalize_name(requirement.name)] = pin.version
    return versions


def test_everything_that_setup_installs_is_locked_with_hashes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    del extras["tiles"]
    wanted = {*project["dependencies"], *install_detectron2.DEPENDENCIES}
    wanted |= {"pip<=26.0", "setuptools>=77"}.union(*extras.values())
    locked = locked_versions()

    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "gw-detectron":
            assert requirement.specifier.contains(locked[name]), (
                f"{name}: run `make lock`"
            )
    for name in ("torch", "detectron2", "gw-detectron", "pytest"):
        assert requirements(name) <= locked.keys(), f"{name}: run `make lock`"


def test_every_imported_library_is_declared():
    lines = importlib.metadata.requires("gw-detectron")
    optional = {canonicalize_name(Requirement(line).name) for line in lines}
    required = requirements("gw-detectron") | requirements("detectron2")
    providers = importlib.metadata.packages_distributions()

    for file in (ROOT / "gw_detectron").rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        # What only a function imports may be optional; what is tried, with an answer to its absence, need not be there.
        in_functions = imports_inside(tree, ast.FunctionDef)
        tried = imports_inside(tree, ast.Try)
        for name in imports(tree) - tried:
            allowed = required | optional if name in in_functions else required
            packages = providers.get(name, [name])  # an extra need not be there
            known = allowed & set(map(canonicalize_name, packages))
            assert known, f"{file} imports {name}: add it to pyproject.toml"
