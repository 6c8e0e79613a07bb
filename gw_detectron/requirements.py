"""Detect Detectron2, and say how to install it where it is missing."""

import importlib.abc
from collections.abc import Sequence
from typing import Any

from .errors import UserError

#: names of ``gw_detectron`` that need Detectron2: functions, then modules
FUNCTIONS = ("add_gw_config",)
MODULES = (
    "analysis",
    "checkpoint",
    "config",
    "data",
    "engine",
    "env",
    "export",
    "model_zoo",
    "modeling",
    "pictures",
    "preflight",
)


class MissingDetectron2Error(UserError, ImportError):
    """A part of the package that needs Detectron2 is imported without it."""


class MissingDetectron2NameError(UserError, AttributeError):
    """A name of the package that needs Detectron2 is used without it."""


def has_detectron2() -> bool:
    """Whether Detectron2 is installed. Errors inside an installed Detectron2 propagate."""
    try:
        import detectron2  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "detectron2":
            raise
        return False
    return True


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


class Detectron2Guard(importlib.abc.MetaPathFinder):
    """Import hook that requires Detectron2 for modules of this package.

    Python also asks it for names of ``from gw_detectron import name`` that the package does not have.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        package, _, module = fullname.partition(".")
        if package == __package__ and module.partition(".")[0] in (*FUNCTIONS, *MODULES):
            require_detectron2(fullname)
