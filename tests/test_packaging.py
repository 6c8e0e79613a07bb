"""The wheel: what is in it, and that it works where nothing but the wheel and its dependencies is installed."""

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
import gw_detectron.model_zoo

ROOT = Path(__file__).resolve().parent.parent
# Where this environment's libraries are. As PYTHONPATH they serve a second interpreter, without the editable install.
LIBRARIES = os.pathsep.join(str(Path(module.__file__).parent.parent) for module in (torch, detectron2))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy, so that neither a leftover build/ nor a parallel build plays a part."""
    source = tmp_path_factory.mktemp("source")
    for name in ("gw_detectron", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a second environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    options = ["--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *options], check=True)
    return python


def run(python: Path, code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(python), "-c", code], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_wheel_holds_all_code_and_all_configs(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gw_detectron").rglob("*.py")}
    files_of_configs = (path for path in (ROOT / "configs").rglob("*.*") if path.suffix in (".yaml", ".py"))
    configs = {f"gw_detectron/{path.relative_to(ROOT).as_posix()}" for path in files_of_configs}
    assert configs
    assert files == code | configs | {"gw_detectron/py.typed"}


@pytest.mark.slow
def test_wheel_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = importlib.metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA")))
        assert metadata.version == gw_detectron.__version__
        assert metadata.metadata["License-Expression"] == "Apache-2.0"
        assert any(path.endswith("licenses/LICENSE") for path in archive.namelist())
        # The registries have no project of this name that is Detectron2.
        assert "detectron2" not in {canonicalize_name(Requirement(line).name) for line in metadata.requires or []}


def imports(tree: ast.AST) -> set[str]:
    """The first parts of the names of all modules that are imported, except relative ones."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names} - {"gw_detectron", "detectron2"} - sys.stdlib_module_names


def requirements(name: str) -> set[str]:
    """Return what a distribution requires without extras, and what those require in turn."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for line in importlib.metadata.requires(pending.pop()) or []:
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            if needed not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                found.add(needed)
                pending.append(needed)
    return found


def locked_versions() -> dict[str, str]:
    """Read requirements.txt for this interpreter; each entry must have a version and hashes."""
    versions = {}
    for line in re.sub(r"\\\n", "", re.sub(r"(?m)^#.*\n", "", (ROOT / "requirements.txt").read_text())).splitlines():
        text, *hashes = line.split("--hash=sha256:")
        requirement = Requirement(text)
        (pin,) = requirement.specifier
        assert pin.operator == "==" and hashes, line
        assert all(re.fullmatch("[0-9a-f]{64} *", digest) for digest in hashes), line
        if requirement.marker is None or requirement.marker.evaluate():
            versions[canonicalize_name(requirement.name)] = pin.version
    return versions


def test_everything_that_setup_installs_is_locked():
    locked = locked_versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    outdated = []
    for line in [*project["dependencies"], *extras, *install_detectron2.DEPENDENCIES, "pip<=26.0", "setuptools>=77"]:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name != "gw-detectron" and not requirement.specifier.contains(locked.get(name, "0")):
            outdated.append(line)
    needed = requirements("torch") | requirements("detectron2") | requirements("gw-detectron") | requirements("pytest")
    missing = sorted(needed - set(locked))
    assert not outdated and not missing, "run `make lock`"


def test_every_imported_library_is_declared():
    optional = {canonicalize_name(Requirement(line).name) for line in importlib.metadata.requires("gw-detectron") or []}
    required = requirements("gw-detectron") | requirements("detectron2")
    providers = importlib.metadata.packages_distributions()
    undeclared = []
    for file in sorted((ROOT / "gw_detectron").rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        # What only a function imports may be optional.
        in_functions = {name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for name in imports(node)}
        # What is tried, with an answer to its absence, need not be there.
        tried = {name for node in ast.walk(tree) if isinstance(node, ast.Try) for name in imports(node)}
        for name in set(imports(tree)) - tried:
            allowed = required | (optional if name in in_functions else set())
            if allowed.isdisjoint(map(canonicalize_name, providers.get(name, []))):
                undeclared.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not undeclared, "add to pyproject.toml: " + "; ".join(undeclared)


@pytest.mark.slow
def test_installed_wheel_registers_the_components_and_serves_the_configs(bare_python: Path, tmp_path: Path):
    code = """
import gw_detectron, gw_detectron.model_zoo as zoo
from detectron2.data import DatasetCatalog
from detectron2.modeling import BACKBONE_REGISTRY, ROI_BOX_HEAD_REGISTRY, ROI_MASK_HEAD_REGISTRY
for name in "resnet", "resnet_fpn", "retinanet_resnet_fpn":
    BACKBONE_REGISTRY.get(f"build_gw_{name}_backbone")
ROI_BOX_HEAD_REGISTRY.get("GWFastRCNNConvFCHead")
ROI_MASK_HEAD_REGISTRY.get("GWMaskRCNNConvUpsampleHead")
assert "gw_synthetic_train" in DatasetCatalog.list()
for name in zoo.list_configs():
    assert zoo.get_config_file(name).startswith(gw_detectron.__path__[0]), zoo.get_config_file(name)
    assert zoo.get_config(name).get("VERSION", 2) == 2
print(gw_detectron.__file__, len(zoo.list_configs()))
"""
    result = run(bare_python, code, tmp_path, PYTHONPATH=LIBRARIES)
    assert result.returncode == 0, result.stderr
    where, count = result.stdout.split()
    assert Path(where).is_relative_to(bare_python.parent.parent)
    assert int(count) == len(gw_detectron.model_zoo.list_configs()) > 0


@pytest.mark.slow
def test_without_detectron2_the_layers_work_and_the_rest_says_what_to_install(bare_python: Path, tmp_path: Path):
    # torch and what it needs, and nothing else of this environment
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ["torch", *requirements("torch")]:
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            if ".." not in top and not (libraries / top).exists():
                (libraries / top).symlink_to(
                    file.locate().parents[len(file.parts) - 2] if file.parts[1:] else file.locate()
                )
    code = """
import torch
from gw_detectron import BatchWhitening2d, GroupWhitening2d
for layer in GroupWhitening2d(16, 8), BatchWhitening2d(16, 8):
    layer(torch.randn(2, 16, 5, 5, requires_grad=True)).sum().backward()
    assert layer.weight.grad.isfinite().all()
print("layers work")
import gw_detectron
gw_detectron.add_gw_config
"""
    result = run(bare_python, code, tmp_path, PYTHONPATH=str(libraries))
    lines = result.stderr.strip().splitlines()
    assert (result.stdout, result.returncode) == ("layers work\n", 1), result.stderr
    assert "needs Detectron2, which is not installed." in lines[-1], result.stderr
    assert "tools/install_detectron2.py" in lines[-1]
    assert "https://detectron2.readthedocs.io" in lines[-1]
    assert sum("Traceback" in line for line in lines) == 1  # no chain of exceptions
