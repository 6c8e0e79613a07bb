"""Detect Detectron2 and optional packages, and say how to install a missing one."""

import contextlib
import importlib.abc
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from .errors import MissingDetectron2Error, MissingPackageError, UserError

#: names of ``gw_detectron`` that need Detectron2: functions, then modules
FUNCTIONS = ("add_gw_config",)
MODULES = (
    "analysis",
    "checkpoint",
    "config",
    "data",
    "demo",
    "engine",
    "env",
    "export",
    "model_zoo",
    "modeling",
    "pictures",
    "prediction",
    "preflight",
    "report",
    "weights",
)
_PIP_NAMES = {"cv2": "opencv-python-headless"}


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
    """Whether Detectron2 has its compiled operators, among them its COCO evaluation."""
    try:
        from detectron2 import _C

        return hasattr(_C, "COCOevalEvaluateImages")
    except ImportError:  # not compiled, or a pure Python build, which raises at the attribute
        return False


@contextlib.contextmanager
def scripting_warnings_ignored() -> Iterator[None]:
    """Hide that ``torch.jit.script`` is deprecated: fvcore and Detectron2 v0.5 call it at import."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", FutureWarning)
        yield


def require_detectron2(name: str, error: type[UserError] = MissingDetectron2Error) -> None:
    """Raise an error unless Detectron2 is installed.

    Args:
        name: the module or attribute that needs it.
        error: the error's type.
    """
    if not has_detectron2():
        raise error(
            f"{name}: needs Detectron2, which is not installed. Fix: run `python tools/install_detectron2.py` from the "
            "gw_detectron repository, or follow https://detectron2.readthedocs.io/tutorials/install.html"
        )


def require_packages(what: str, *names: str) -> None:
    """Raise MissingPackageError unless optional packages are installed.

    Args:
        what: needs them; begins the message.
        names: as they are imported.
    """
    missing = [_PIP_NAMES.get(name, name) for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"{what}: not installed: {', '.join(missing)}. Fix: pip install {' '.join(missing)}")


class Detectron2Guard(importlib.abc.MetaPathFinder):
    """Import hook that requires Detectron2 for modules of this package.

    Python also asks it for names of ``from gw_detectron import name`` that the package does not have.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        package, _, module = fullname.partition(".")
        if package == __package__ and {module, module.partition(".")[0]} & {*FUNCTIONS, *MODULES}:
            require_detectron2(fullname)
