"""Build the wheel `detectron2 0.6+pure`: Detectron2 v0.6 without its compiled operators.

The source archive holds the Python files of the official release. pip downloads it, its hash is checked, the patches of
detectron2_patches.py are applied, and a stub replaces the compiled operators. Faster/Mask R-CNN and RetinaNet do not
need them: their RoIAlign and NMS are torchvision's. This module uses only the standard library; the command line is
install_detectron2.py.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path

from detectron2_patches import FIX_SDIST, PATCHES, SDIST, STUB, InstallError, Patch

SDIST_SHA256 = "5d2e9e51e523ec72f6a31cca04b0a515492e9514b773a3d134cedc0677170b29"
VERSION = "0.6+pure"

# The dependencies of the release, without those of its Caffe2 export (future, pydot) and without its pin of black.
# OpenCV is not declared, as in the release: several packages provide cv2 and only one may be installed.
DEPENDENCIES = (
    "torch>=2.4",
    "torchvision",
    "numpy",
    "Pillow>=9.1",
    "matplotlib",
    "pycocotools>=2.0.6",
    "termcolor>=1.1",
    "yacs>=0.1.8",
    "tabulate",
    "cloudpickle",
    "tqdm>4.29.0",
    "tensorboard",
    "fvcore>=0.1.5,<0.1.6",
    "iopath>=0.1.7",
    "omegaconf>=2.1",
    "hydra-core>=1.1",
    "black",
)

# Identifies the content of the built wheel: a pure build with another recipe is replaced.
RECIPE = hashlib.sha256(repr((SDIST_SHA256, DEPENDENCIES, STUB, PATCHES)).encode()).hexdigest()[:12]


def say(message: str) -> None:
    print(f"[install_detectron2] {message}", flush=True)


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def probe(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that ignores the current folder."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def run(command: Sequence[str], task: str) -> None:
    """Run a command quietly.

    Raises:
        InstallError: it failed; the message has the end of its output.
    """
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise InstallError(f"{task} failed:\n{tail}")


def check_environment() -> None:
    """Raise InstallError unless torch, pip and setuptools can be imported. Download and build need them."""
    needs = {
        "torch": ("import torch", "install torch and torchvision first; the archive's setup script imports torch."),
        "pip": ("import pip", f"run `{sys.executable} -m ensurepip` first."),
        "setuptools 70.1 or newer": (
            "from setuptools import __version__ as v; assert [int(n) for n in v.split('.')[:2]] >= [70, 1], v",
            f"run `{sys.executable} -m pip install --upgrade setuptools` first.",
        ),
    }
    for name, (code, advice) in needs.items():
        result = probe(code)
        if result.returncode:
            raise InstallError(f"{name}: cannot be imported: {last_line(result.stderr)}. Fix: {advice}")


def pip_commands() -> list[list[str]]:
    """List the pips to try: the installed one, then the older one that Python bundles for ensurepip.

    pip after 26.0 refuses this archive because an extra of it has a dependency with a URL.
    """
    commands = [[sys.executable, "-m", "pip"]]
    places = [sysconfig.get_path("stdlib") + "/ensurepip/_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR")]
    for place in filter(None, places):
        commands += [[sys.executable, str(wheel / "pip")] for wheel in sorted(Path(place).glob("pip-*.whl"))]
    return commands


def read_archive(archive: Path) -> bytes:
    """Read the source archive, once, and check its SHA-256.

    Raises:
        InstallError: it is another file.
    """
    data = archive.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != SDIST_SHA256:
        raise InstallError(
            f"{archive}: SHA-256 is {found}, expected {SDIST_SHA256}. The file is damaged or another one; nothing was "
            f"installed. Fix: download {SDIST} again (after `pip cache purge` if pip downloaded this file)."
        )
    return data


def download(folder: Path) -> Path:
    """Download the archive from pip's registry into a folder; return its path."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{SDIST} --hash=sha256:{SDIST_SHA256}\n", "utf-8")
    options = ["download", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
    options += ["--require-hashes", "--requirement", str(requirements), "--dest", str(folder)]
    failures = []
    for pip in pip_commands():
        try:
            run(pip + options, f"Downloading {SDIST} with `{' '.join(pip)}`")
        except InstallError as error:
            failures.append(str(error))
        else:
            return next(folder.glob("*.tar.gz"))
    raise InstallError("\n".join([*failures, download_advice("\n".join(failures))]))


def download_advice(output: str) -> str:
    """Return the fix for failed downloads, from the output of the pips."""
    if "DO NOT MATCH THE HASHES" in output:
        return "The registry has another file of this name; nothing was installed. Fix: use another registry."
    if "direct URL" in output:
        return f"This pip is too new for the archive. Fix: run `{sys.executable} -m pip install 'pip<=26.0'` first."
    return (
        "Fix: without a network, build the wheel on another machine (`--wheel-dir DIR`) and `pip install` it here, or "
        "give the downloaded archive with `--sdist FILE`."
    )


def extract(data: bytes, folder: Path) -> Path:
    """Unpack an archive of known hash and return its only top folder."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (top,) = folder.iterdir()
    return top


def release_projects(root: Path) -> dict[str, str]:
    """Read the projects installed as detectron2.projects.*, {package: folder}, from the release's setup.py."""
    for node in ast.parse((root / "setup.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PROJECTS":
            return ast.literal_eval(node.value)
    raise InstallError(f"setup.py: no PROJECTS in it; the source archive is another release. {FIX_SDIST}")


def prepare_tree(root: Path, patches: Sequence[Patch] = PATCHES) -> None:
    """Patch the unpacked release into a source tree of `detectron2 0.6+pure` for setuptools."""
    for patch in patches:
        patch.apply(root)
    (root / "detectron2" / "_C.py").write_text(STUB.replace("@RECIPE@", RECIPE), "utf-8")
    projects = release_projects(root)
    folders = sorted(init.parent.relative_to(root) for init in (root / "detectron2").rglob("__init__.py"))
    packages = [".".join(folder.parts) for folder in folders if "configs" not in folder.parts] + list(projects)
    lines = [
        "[build-system]",
        'requires = ["setuptools>=70.1"]',
        'build-backend = "setuptools.build_meta"',
        "[project]",
        'name = "detectron2"',
        f'version = "{VERSION}"',
        'description = "Detectron2 v0.6 without its compiled operators"',
        'requires-python = ">=3.9"',
        f"dependencies = {list(DEPENDENCIES)}",
        "[tool.setuptools]",
        f"packages = {packages}",
        "include-package-data = false",
        "[tool.setuptools.package-dir]",
        *(f'"{package}" = "{folder}"' for package, folder in projects.items()),
        "[tool.setuptools.package-data]",
        '"detectron2.model_zoo" = ["configs/**/*.yaml", "configs/**/*.py"]',
    ]
    (root / "setup.py").unlink()
    (root / "pyproject.toml").write_text("\n".join(lines) + "\n", "utf-8")


def build_wheel(archive: bytes | None, work: Path) -> Path:
    """Download the archive unless it is given, patch it and build the wheel in `work`; return its path."""
    if archive is None:
        say(f"Downloading {SDIST}.")
        archive = read_archive(download(work))
    root = extract(archive, work / "source")
    prepare_tree(root)
    say(f"Building the wheel of detectron2 {VERSION}.")
    out = work / "wheel"
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps"]
    run([*pip_wheel, "--no-build-isolation", "--wheel-dir", str(out), str(root)], "Building the wheel")
    return next(out.glob("detectron2-*.whl"))
