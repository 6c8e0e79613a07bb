"""The version of the package, defined here alone, its commit, and the versions of others."""

import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

__version__ = "0.2.0.dev0"


def git_commit(root: Path = Path(__file__).parents[1]) -> str:
    """Return the commit of a checkout, with ``-dirty`` if tracked files changed; empty if it is no checkout."""
    if not (root / ".git").exists():  # git would find a checkout around ``root``, such as one around site-packages
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or too slow
        return ""


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones of some packages."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
