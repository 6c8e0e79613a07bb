"""What is installed: this package's version, Detectron2, optional packages, and how to get a missing one."""

import contextlib
import importlib.util
import subprocess
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from .errors import MissingPackageError

__version__ = "0.3.0"
TOOL = f"gw_detectron {__version__}"  # in files that this package writes

_PIP_NAMES = {"cv2": "opencv-python-headless"}


def git_commit(root: Path = Path(__file__).parents[1]) -> str:
    """Return the commit of a checkout, with ``-dirty`` if tracked files changed; empty outside of a checkout."""
    # git would find a checkout around ``root``, such as one around site-packages
    if not (root / ".git").exists():
        return ""
    command = (
        "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*"
    )
    try:
        described = subprocess.run(
            command.split(), cwd=root, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):  # no git, or too slow
        return ""
    return described.stdout.strip()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages among some names."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def has_detectron2() -> bool:
    """Whether Detectron2 is installed. Errors inside an installed Detectron2 propagate."""
    try:
        import detectron2  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "detectron2":
            raise
        return False
    return True


def has_compiled_operators() -> bool:
    """Whether Detectron2 has its compiled operators, among them a fast COCO evaluation."""
    try:
        from detectron2 import _C

        return hasattr(_C, "COCOevalEvaluateImages")
    # not compiled, or a pure Python build, which raises at the attribute
    except ImportError:
        return False


@contextlib.contextmanager
def scripting_warnings_ignored() -> Iterator[None]:
    """Hide that ``torch.jit.script`` is deprecated: fvcore and Detectron2 call it at import."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"`torch\.jit\.script` is deprecated", FutureWarning
        )
        yield


def require_detectron2(name: str) -> None:
    """Raise MissingPackageError unless Detectron2 is installed; ``name`` is what needs it."""
    if not has_detectron2():
        raise MissingPackageError(
            f"{name}: needs Detectron2, which is not installed. Fix: run `python tools/install_detectron2.py` from the "
            "gw_detectron repository, or follow https://detectron2.readthedocs.io/tutorials/install.html"
        )


def require_packages(what: str, *names: str) -> None:
    """Raise MissingPackageError unless the packages of a feature are installed; names are as they are imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        packages = [_PIP_NAMES.get(name, name) for name in missing]
        raise MissingPackageError(
            f"{what}: not installed: {', '.join(packages)}. Fix: pip install {' '.join(packages)}"
        )
