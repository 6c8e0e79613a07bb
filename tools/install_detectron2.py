#!/usr/bin/env python3
"""Install Detectron2 v0.6 as a pure Python wheel, unless a detectron2 is installed.

For machines that reach only a package registry, which does not have Detectron2 under its own name. With internet and a
C++ compiler, follow Detectron2's own instructions instead. The archive below holds the Python files of the release; the
patches make them run with current torch, NumPy, Pillow and setuptools, and a stub replaces the compiled operators.
Faster/Mask R-CNN, RetinaNet and FCOS do not need them: their RoIAlign and NMS are torchvision's.
"""

import argparse
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

SDIST = "pb1-detectron2==0.6"
SDIST_SHA256 = "5d2e9e51e523ec72f6a31cca04b0a515492e9514b773a3d134cedc0677170b29"
VERSION = "0.6+pure.2"  # Change it with the patches: "+pure" builds of another version are replaced.

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

PROJECTS = (
    "PointRend/point_rend",
    "DeepLab/deeplab",
    "Panoptic-DeepLab/panoptic_deeplab",
)

# (file, regular expression, replacement)
PATCHES = (
    # NumPy 1.24 removed the aliases of builtin types.
    *(
        (file, r"\bnp\.(bool|int|float|str|object)\b", r"\1")
        for file in (
            "data/build.py",
            "data/datasets/pascal_voc.py",
            "evaluation/pascal_voc_evaluation.py",
            "evaluation/sem_seg_evaluation.py",
            "structures/masks.py",
            "utils/video_visualizer.py",
            "utils/visualizer.py",
        )
    ),
    # Pillow 10 removed Image.LINEAR, an alias of BILINEAR.
    ("data/transforms/transform.py", r"Image\.LINEAR", "Image.BILINEAR"),
    # setuptools 82 removed pkg_resources.
    ("model_zoo/model_zoo.py", r"^import pkg_resources$", "import importlib.resources"),
    (
        "model_zoo/model_zoo.py",
        r'pkg_resources\.resource_filename\(\s*"detectron2\.model_zoo", (.*)\s*\)$',
        r'str(importlib.resources.files("detectron2.model_zoo") / \1)',
    ),
    # PyTorch no longer includes Caffe2; the rest of detectron2.export does not need it.
    (
        "export/__init__.py",
        r"^from \.api import \*$",
        "try:\n    from .api import *\nexcept ModuleNotFoundError:  # Caffe2\n    pass",
    ),
    # The fast evaluation is a compiled operator: COCOEvaluator uses faster-coco-eval, without it pycocotools.
    (
        "evaluation/coco_evaluation.py",
        r"^from detectron2\.evaluation\.fast_eval_api import COCOeval_opt$",
        "try:\n    from faster_coco_eval import COCOeval_faster as COCOeval_opt\n"
        "except ImportError:\n    COCOeval_opt = COCOeval",
    ),
    (  # faster-coco-eval takes keypoints from its own COCO class only
        "evaluation/coco_evaluation.py",
        r"\(COCOeval_opt if use_fast_impl else COCOeval\)",
        '(COCOeval_opt if use_fast_impl and iou_type != "keypoints" else COCOeval)',
    ),
    # These only silence warnings of torch.
    (
        "engine/train_loop.py",
        r"from torch\.cuda\.amp import GradScaler",
        "from torch.amp import GradScaler",
    ),
    ("engine/train_loop.py", r"with autocast\(\):", 'with torch.autocast("cuda"):'),
    (
        "modeling/anchor_generator.py",
        r"meshgrid\((.*)\)$",
        r'meshgrid(\1, indexing="ij")',
    ),
)

STUB = '''\
"""Stub of the compiled operators, which this pure Python build of Detectron2 does not have."""


def get_compiler_version():
    return "none (pure Python build)"


def get_cuda_version():
    return "none (pure Python build)"


def has_cuda():
    return False


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"detectron2._C.{name}: compiled operator, not in the pure Python build of Detectron2. That build has no "
        "rotated boxes, no deformable convolution on a GPU and no fast COCO evaluation. Fix: install Detectron2 from "
        "source, see https://detectron2.readthedocs.io/tutorials/install.html"
    )
'''

PYPROJECT = f"""\
[build-system]
requires = ["setuptools>=70.1"]
build-backend = "setuptools.build_meta"
[project]
name = "detectron2"
version = "{VERSION}"
description = "Detectron2 v0.6 without its compiled operators"
requires-python = ">=3.9"
dependencies = {list(DEPENDENCIES)}
[tool.setuptools]
include-package-data = false
[tool.setuptools.packages.find]
include = ["detectron2", "detectron2.*"]
namespaces = false
[tool.setuptools.package-data]
"detectron2.model_zoo" = ["configs/**/*.yaml", "configs/**/*.py"]
"""


class InstallError(Exception):
    """An error that the user can fix; its message names the fix."""


def say(message: str) -> None:
    print(f"[install_detectron2] {message}", flush=True)


def run(command: Sequence[str], task: str) -> None:
    """Run a command quietly; raise InstallError with the end of its output if it fails."""
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise InstallError(f"{task} failed:\n{tail}")


def pip_commands() -> list[list[str]]:
    """List the pips to try: the installed one, then the older one that Python bundles for ensurepip.

    pip after 26.0 refuses this archive because an extra of it has a dependency with a URL.
    """
    commands = [[sys.executable, "-m", "pip"]]
    places = [
        sysconfig.get_path("stdlib") + "/ensurepip/_bundled",
        sysconfig.get_config_var("WHEEL_PKG_DIR"),
    ]
    for place in filter(None, places):
        commands += [
            [sys.executable, str(wheel / "pip")]
            for wheel in sorted(Path(place).glob("pip-*.whl"))
        ]
    return commands


def download(folder: Path) -> Path:
    """Download the archive from pip's registry into a folder; return its path."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{SDIST} --hash=sha256:{SDIST_SHA256}\n")
    options = [
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
    ]
    options += [
        "--require-hashes",
        "--requirement",
        str(requirements),
        "--dest",
        str(folder),
    ]
    say(f"Downloading {SDIST}.")
    failures = []
    for pip in pip_commands():
        try:
            run(pip + options, f"Downloading {SDIST} with `{' '.join(pip)}`")
        except InstallError as error:
            failures.append(str(error))
        else:
            return next(folder.glob("*.tar.gz"))
    raise InstallError(
        "\n".join(failures)
        + "\nFix: install pip<=26.0 if pip refuses a direct URL. Without a network, build the "
        "wheel on another machine (--wheel-dir DIR) and install it here with pip, or give the archive with --sdist."
    )


def read_archive(archive: Path) -> bytes:
    """Read the source archive, once, and check its SHA-256."""
    data = archive.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != SDIST_SHA256:
        raise InstallError(
            f"{archive}: SHA-256 is {found}, expected {SDIST_SHA256}: it is not {SDIST}, or damaged."
        )
    return data


def patch_tree(root: Path) -> None:
    """Turn the unpacked release into a source tree of the pure Python build."""
    package = root / "detectron2"
    for name, pattern, replacement in PATCHES:
        file = package / name
        text, count = re.subn(
            pattern, replacement, file.read_text("utf-8"), flags=re.MULTILINE
        )
        if not count:
            raise InstallError(
                f"{name}: {pattern!r} is not in it; the source archive is not {SDIST}."
            )
        file.write_text(text, "utf-8")
    (package / "_C.py").write_text(STUB)
    for project in PROJECTS:
        shutil.move(root / "projects" / project, package / "projects")
    (root / "setup.py").unlink()
    (root / "pyproject.toml").write_text(PYPROJECT)


def build_wheel(archive: Path | None, folder: Path) -> Path:
    """Build the wheel into a folder; return its path.

    Args:
        archive: the source archive; downloaded if None.
        folder: created if it does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="detectron2-") as work:
        data = read_archive(archive or download(Path(work)))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            tar.extractall(Path(work, "source"), filter="data")
        (root,) = Path(work, "source").iterdir()
        patch_tree(root)
        say(f"Building the wheel of detectron2 {VERSION}.")
        pip_wheel = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        run(
            [*pip_wheel, "--no-build-isolation", "--wheel-dir", str(folder), str(root)],
            "Building the wheel",
        )
    return next(folder.glob(f"detectron2-{VERSION}-*.whl"))


def installed_version() -> str:
    """Return the version of the installed detectron2, "unknown" for a source tree, or "" for none."""
    if importlib.util.find_spec("detectron2") is None:
        return ""
    try:
        return metadata.version("detectron2")
    except metadata.PackageNotFoundError:
        return "unknown"


def check_import() -> None:
    """Import detectron2 in a new process; raise InstallError if that fails."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # without the current folder
    command = [sys.executable, "-W", "ignore", "-c", "import detectron2.modeling"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(
            f"detectron2: installed, but cannot be imported: {reason}\n"
            "Fix: repair or uninstall it, or give --force to replace it with the pure Python build."
        )


def install(archive: Path | None, force: bool) -> None:
    """Build and install the wheel with its dependencies, unless a detectron2 is installed."""
    version = installed_version()
    outdated = "+pure" in version and version != VERSION
    if version and not outdated and not force:
        check_import()
        say(f"detectron2 {version} is installed and stays as it is.")
        return
    if importlib.util.find_spec("torch") is None:
        raise InstallError(
            "torch: not installed; the archive's setup script needs it. Fix: install torch first."
        )
    with tempfile.TemporaryDirectory(prefix="detectron2-") as work:
        wheel = build_wheel(archive, Path(work))
        pip_install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-input",
        ]
        # Dependencies first: if they fail, an installed detectron2 is unchanged.
        say("Installing the dependencies.")
        if subprocess.run(
            [*pip_install, "--quiet", *DEPENDENCIES], stdin=subprocess.DEVNULL
        ).returncode:
            raise InstallError(
                "Installing the dependencies failed; detectron2 was not installed. See pip's message."
            )
        run(
            [*pip_install, "--no-deps", "--force-reinstall", str(wheel)],
            "Installing detectron2",
        )
    check_import()
    say(f"detectron2 {VERSION} is installed.")


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 if detectron2 works or the wheel is written, 1 after an error message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--wheel-dir",
        type=Path,
        metavar="DIR",
        help="only build the wheel and write it to DIR",
    )
    parser.add_argument(
        "--sdist",
        type=Path,
        metavar="FILE",
        help="use this source archive instead of a download",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an installed detectron2"
    )
    args = parser.parse_args(argv)
    try:
        if args.wheel_dir is None:
            install(args.sdist, args.force)
        else:
            say(
                f"Wrote {build_wheel(args.sdist, args.wheel_dir)}. Install it on any machine with `pip install`."
            )
    except (InstallError, OSError) as error:
        print(f"[install_detectron2] ERROR: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
