"""The config files that this package brings."""

import difflib
import importlib.resources
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .errors import MissingFileError


def shipped_configs() -> dict[str, Path]:
    """Return the paths of all config files by their sorted names relative to the folder ``configs``.

    Raises:
        MissingFileError: the installation has no configs.
    """
    package = Path(str(importlib.resources.files("gw_detectron")))
    # A wheel has the configs inside the package; a clone, also an editable install of it, has them beside it.
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            files = sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".py"))
            return {path.relative_to(folder).as_posix(): path for path in files}
    raise MissingFileError(
        f"configs ({str(package / 'configs')!r}): folder not found. Fix: install gw_detectron again."
    )


def config_summary(path: Path) -> str:
    """Return the first sentence of the comment at the head of a config file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.) ", comment, maxsplit=1)[0]


def find_config_file(name: str | os.PathLike[str]) -> str:
    """Return the path of a shipped config if no file has this path, else the path itself.

    ``configs/`` before a name may be left out or written, and the folder of a name that only one config has.
    """
    name = os.fspath(name)
    if os.path.exists(name) or not name:
        return name
    files = shipped_configs()
    wanted = name.removeprefix("configs/")
    found = (
        [wanted]
        if wanted in files
        else [each for each in files if each.rpartition("/")[2] in (wanted, f"{wanted}.yaml")]
    )
    return str(files[found[0]]) if len(found) == 1 else name


def similar_configs(name: str, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return " Similar: a, b." for the shipped configs, and others, whose file names are near to that of a name, or "".

    Args:
        name: not that of a config.
        others: file name -> path.
    """
    known = {file.rpartition("/")[2].lower(): file for file in shipped_configs()}
    known |= {file.lower(): path for file, path in others.items()}
    last = Path(name).name.lower()
    alike = difflib.get_close_matches(last, known, n=3) or [file for file in known if last and last in file.lower()][:3]
    return f" Similar: {', '.join(known[file] for file in alike)}." if alike else ""
