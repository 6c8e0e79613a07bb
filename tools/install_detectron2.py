#!/usr/bin/env python3
"""Install Detectron2 where only a package registry can be reached.

Detectron2 is not published on the registries under its own name: upstream's way is its source repository and a
C++ compiler. Where you have both, do that first. An importable detectron2 is left alone; otherwise this installs
the pure Python wheel that detectron2_wheel.py builds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from detectron2_wheel import (
    DEPENDENCIES,
    RECIPE,
    VERSION,
    InstallError,
    build_wheel,
    check_environment,
    last_line,
    probe,
    run,
    say,
)


@dataclass(frozen=True)
class Found:
    """What this interpreter imports as detectron2; recipe is "" for anything but a pure build of ours."""

    where: str
    version: str = ""
    recipe: str = ""
    error: str = ""


def find_detectron2() -> Found | None:
    """Looks for detectron2. Returns: None if there is none; Found.error is set if it does not import."""
    result = probe(
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('detectron2')\n"
        "if spec is None: sys.exit(3)\n"
        "print(spec.origin or 'a folder without __init__.py', flush=True)\n"
        "import detectron2.modeling\n"
        "operators = sys.modules.get('detectron2._C')\n"
        "print(detectron2.__version__, vars(operators).get('PURE_BUILD', '') if operators else '')\n"
    )
    if result.returncode == 3:
        return None
    where, _, rest = result.stdout.partition("\n")
    if result.returncode:
        return Found(where, error=last_line(result.stderr))
    version, _, recipe = rest.strip().partition(" ")
    return Found(str(Path(where).parent), version, recipe)


def site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def unfinished_mark() -> Path:
    """A file that exists while pip copies the wheel into place, and later only if that was interrupted."""
    return site_packages() / "detectron2-pure.installing"


def remove_unfinished() -> None:
    """Takes away what an interrupted run left in site-packages."""
    if unfinished_mark().exists():
        say("Removing what an interrupted installation left behind.")
        for leftover in [site_packages() / "detectron2", *site_packages().glob("detectron2-*.dist-info")]:
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished_mark().unlink()


def install_wheel(wheel: Path, constraint: Path | None) -> None:
    """Installs the wheel and its dependencies; leftovers of an interruption are removed, at the latest next time."""
    pip_install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # The dependencies alone first: if they fail, nothing of detectron2 has been touched.
    say("Installing its dependencies.")
    limits = ["--constraint", str(constraint)] if constraint is not None else []
    if subprocess.run([*pip_install, "--quiet", *limits, *DEPENDENCIES], stdin=subprocess.DEVNULL).returncode:
        raise InstallError("Installing the dependencies failed, pip's message is above; detectron2 was not installed.")
    unfinished_mark().touch()
    try:
        run([*pip_install, "--no-deps", "--force-reinstall", str(wheel)], "Installing detectron2")
    except BaseException:
        remove_unfinished()
        raise
    unfinished_mark().unlink()


def save_wheel(wheel: Path, folder: Path) -> None:
    """Puts the wheel into folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{wheel.name}.part"
    shutil.copyfile(wheel, partial)
    os.replace(partial, folder / wheel.name)
    say(f"Wrote {folder / wheel.name}; `pip install` takes it on any machine.")


def install(args: argparse.Namespace) -> None:
    """Does what the command line asks. Raises: InstallError, OSError."""
    if args.wheel_dir is None:
        remove_unfinished()
        found = find_detectron2()
        if found is not None and not args.force:
            if found.error:
                raise InstallError(
                    f"{found.where} is found as detectron2 but does not import: {found.error}\n"
                    "Repair or uninstall it, or pass --force to replace it by the pure Python build."
                )
            if found.recipe in ("", RECIPE):
                say(f"detectron2 {found.version} at {found.where} works and is left alone.")
                return
            say(f"The pure Python build at {found.where} is of another version of this script: replacing it.")
    check_environment()
    with tempfile.TemporaryDirectory(prefix="detectron2-") as work:
        wheel = build_wheel(args.sdist, Path(work))
        if args.wheel_dir is not None:
            save_wheel(wheel, args.wheel_dir)
            return
        install_wheel(wheel, args.constraint)
    found = find_detectron2()
    if found is None or found.error:
        raise InstallError(f"It is installed but does not import: {found.error if found else 'it is not found'}")
    say(f"detectron2 {VERSION} is installed at {found.where}.")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Install Detectron2 v0.5 as a pure Python wheel, if there is none.")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="only build the wheel and put it into DIR")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="take this source archive, do not download it")
    parser.add_argument("--constraint", type=Path, metavar="FILE", help="pip constraints for the dependencies")
    parser.add_argument("--force", action="store_true", help="replace an installed detectron2")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns: the exit code, 0 when there is a working detectron2 (or the wheel), else 1 and a message."""
    try:
        install(get_parser().parse_args(argv))
    except (InstallError, OSError) as error:
        print(f"[install_detectron2] ERROR: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[install_detectron2] Interrupted; run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
