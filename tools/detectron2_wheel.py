"""Build the wheel `detectron2 0.5+pure`: Detectron2 v0.5 without its compiled operators.

The source archive holds the Python files of the official release. It is downloaded with pip and checked by its
hash; then detectron2_patches.py is applied, which puts a stub in the place of the compiled operators.
Faster/Mask R-CNN and RetinaNet need none of those: their RoIAlign and NMS are torchvision's. Only the standard
library is used; install_detectron2.py is the command line.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path

from detectron2_patches import PATCHES, STUB, InstallError, Patch

SDIST = "detectron2-cdo==0.5"
SDIST_SHA256 = "53c9e79e9cc943e80419c588ea44b5479507a8628ed14a4e06bd093e29311b18"
VERSION = "0.5+pure"

# What the release declares, less what only its Caffe2 export needed (future, pydot) and its pin of black.
# OpenCV stays undeclared, as in the release: several packages provide cv2 and only one may be installed.
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

# Changes whenever the built wheel would: an older pure build is then replaced.
RECIPE = hashlib.sha256(repr((SDIST_SHA256, DEPENDENCIES, STUB, PATCHES)).encode()).hexdigest()[:12]


def say(message: str) -> None:
    print(f"[install_detectron2] {message}", flush=True)


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def probe(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter; neither the current folder nor earlier imports play a part."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def run(command: Sequence[str], what: str) -> None:
    """Runs a command quietly. Raises: InstallError with the end of its output if it fails."""
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise InstallError(f"{what} failed:\n{tail}")


def check_environment() -> None:
    """Raises: InstallError unless torch, pip and setuptools, which download and build need, can be used."""
    needs = {
        "torch": (
            "import torch",
            "Install torch and torchvision first; the archive's setup script imports torch.",
        ),
        "pip": ("import pip", f"Run `{sys.executable} -m ensurepip` first."),
        "setuptools 70.1 or newer": (
            "from setuptools import __version__ as v; assert [int(n) for n in v.split('.')[:2]] >= [70, 1], v",
            f"Run `{sys.executable} -m pip install --upgrade setuptools` first.",
        ),
    }
    for name, (code, advice) in needs.items():
        result = probe(code)
        if result.returncode:
            raise InstallError(f"{name} cannot be imported here ({last_line(result.stderr)}). {advice}")


def pip_commands() -> list[list[str]]:
    """The pips to try: the installed one, then the older one that Python brings along for ensurepip.

    pip after 26.0 refuses this archive, because one of its extras names a dependency by its address.
    """
    commands = [[sys.executable, "-m", "pip"]]
    places = [sysconfig.get_path("stdlib") + "/ensurepip/_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR")]
    for place in filter(None, places):
        commands += [[sys.executable, str(wheel / "pip")] for wheel in sorted(Path(place).glob("pip-*.whl"))]
    return commands


def check_hash(archive: Path, expected: str = SDIST_SHA256) -> None:
    """Raises: InstallError unless the SHA-256 of the file is the expected one."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != expected:
        raise InstallError(
            f"{archive} has SHA-256 {found}, expected {expected}. It is damaged or another file; nothing was "
            f"installed. Get {SDIST} again (after `pip cache purge` if pip had downloaded it)."
        )


def download(folder: Path) -> Path:
    """Downloads the archive from whatever registry pip is configured for. Returns: its path in folder."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{SDIST} --hash=sha256:{SDIST_SHA256}\n", "utf-8")
    options = [
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
    ]
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
    """What to do about failed downloads, in one sentence, from what the pips printed."""
    if "DO NOT MATCH THE HASHES" in output:
        return "The registry serves another file under this name; nothing was installed. Use another registry."
    if "direct URL" in output:
        return f"This pip is too new for the archive: run `{sys.executable} -m pip install 'pip<=26.0'` first."
    return (
        "If this machine has no network, build the wheel on one that has (`--wheel-dir DIR`), carry it over "
        "and `pip install` it, or pass the downloaded archive with `--sdist FILE`."
    )


def extract(archive: Path, folder: Path) -> Path:
    """Unpacks an archive. Returns: its one top folder. Raises: InstallError if it is unsafe or damaged."""
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            for member in members:
                path = Path(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise InstallError(f"{archive} holds the unsafe member {member.name!r}; nothing was installed.")
            tops = {Path(member.name).parts[0] for member in members}
            if len(tops) != 1:
                raise InstallError(f"{archive} holds {sorted(tops)}, expected one folder; nothing was installed.")
            tar.extractall(folder, members, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    except (tarfile.TarError, EOFError) as error:
        raise InstallError(f"{archive} is not a complete tar archive ({error}); nothing was installed.") from error
    return folder / tops.pop()


def release_projects(root: Path) -> dict[str, str]:
    """The projects installed as detectron2.projects.*, {package: folder}, read from the release's setup.py."""
    for node in ast.parse((root / "setup.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PROJECTS":
            return ast.literal_eval(node.value)
    raise InstallError("The archive's setup.py names no PROJECTS: it is not the release this script knows.")


def prepare_tree(root: Path, patches: Sequence[Patch] = PATCHES) -> None:
    """Turns the unpacked release into a source tree of `detectron2 0.5+pure` that setuptools builds."""
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
        'description = "Detectron2 v0.5 without its compiled operators"',
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


def build_wheel(sdist: Path | None, work: Path) -> Path:
    """Downloads (or takes) the archive, patches it, builds the wheel in work. Returns: the wheel's path."""
    if sdist is None:
        say(f"Downloading {SDIST}.")
        sdist = download(work)
    elif not sdist.is_file():
        raise InstallError(f"--sdist {sdist}: there is no such file.")
    check_hash(sdist)
    root = extract(sdist, work / "source")
    prepare_tree(root)
    say(f"Building the wheel of detectron2 {VERSION}.")
    out = work / "wheel"
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps"]
    run([*pip_wheel, "--no-build-isolation", "--wheel-dir", str(out), str(root)], "Building the wheel")
    return next(out.glob("detectron2-*.whl"))
