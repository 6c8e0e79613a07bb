#!/usr/bin/env python3
"""Install Detectron2 on a machine that reaches only a package registry.

Registries do not have Detectron2 under its own name. Upstream installs it from the source repository with a C++
compiler; where you have both, do that instead. An importable detectron2 is left alone. Otherwise this script installs
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
    read_archive,
    run,
    say,
)


@dataclass(frozen=True)
class Found:
    """The detectron2 that this interpreter imports.

    Args:
        where: its folder.
        version: its version.
        recipe: identifies a pure build of this script; "" for any other build.
        error: why it cannot be imported.
    """

    where: str
    version: str = ""
    recipe: str = ""
    error: str = ""


def find_detectron2() -> Found | None:
    """Look for an installed detectron2; return None if there is none."""
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
    """Return the path of a file that exists during the installation, and afterwards if it was interrupted."""
    return site_packages() / "detectron2-pure.installing"


def remove_unfinished() -> None:
    """Remove the files of an interrupted installation from site-packages."""
    if unfinished_mark().exists():
        say("Removing the files of an interrupted installation.")
        for leftover in [site_packages() / "detectron2", *site_packages().glob("detectron2-*.dist-info")]:
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished_mark().unlink()


def install_wheel(wheel: Path, constraint: Path | None) -> None:
    """Install the wheel and its dependencies.

    An interrupted installation is removed: at once, or by the next run if the process was killed.
    """
    pip_install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # Dependencies first: if they fail, detectron2 is unchanged.
    say("Installing the dependencies.")
    limits = ["--constraint", str(constraint)] if constraint is not None else []
    if subprocess.run([*pip_install, "--quiet", *limits, *DEPENDENCIES], stdin=subprocess.DEVNULL).returncode:
        raise InstallError(
            "Installing the dependencies failed; detectron2 was not installed. Fix: see pip's message above."
        )
    unfinished_mark().touch()
    try:
        run([*pip_install, "--no-deps", "--force-reinstall", str(wheel)], "Installing detectron2")
    except BaseException:
        remove_unfinished()
        raise
    unfinished_mark().unlink()


def save_wheel(wheel: Path, folder: Path) -> None:
    """Write the wheel into a folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{wheel.name}.part"
    shutil.copyfile(wheel, partial)
    os.replace(partial, folder / wheel.name)
    say(f"Wrote {folder / wheel.name}. Install it on any machine with `pip install`.")


def install(args: argparse.Namespace) -> None:
    """Install Detectron2, or write its wheel, as the command line asks.

    Raises:
        InstallError: the user can fix it.
        OSError: a file cannot be read or written.
    """
    for flag, file in (("--sdist", args.sdist), ("--constraint", args.constraint)):
        if file is not None and not file.is_file():
            raise InstallError(f"{flag} ('{file}'): file not found (cwd: {os.getcwd()}). Fix: give an existing file.")
    archive = read_archive(args.sdist) if args.sdist is not None else None
    if args.wheel_dir is None:
        remove_unfinished()
        found = find_detectron2()
        if found is not None and not args.force:
            if found.error:
                raise InstallError(
                    f"detectron2 ('{found.where}'): cannot be imported: {found.error}\n"
                    "Fix: repair or uninstall it, or give --force to replace it with the pure Python build."
                )
            if found.recipe in ("", RECIPE):
                say(f"detectron2 {found.version} at {found.where} works and stays as it is.")
                return
            say(f"Replacing the pure Python build at {found.where}, which is of another version of this script.")
    check_environment()
    with tempfile.TemporaryDirectory(prefix="detectron2-") as work:
        wheel = build_wheel(archive, Path(work))
        if args.wheel_dir is not None:
            save_wheel(wheel, args.wheel_dir)
            return
        install_wheel(wheel, args.constraint)
    found = find_detectron2()
    if found is None or found.error:
        reason = found.error if found else "not found"
        raise InstallError(f"detectron2: installed, but cannot be imported: {reason}. Fix: uninstall it and try again.")
    say(f"detectron2 {VERSION} is installed at {found.where}.")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Install Detectron2 v0.6 as a pure Python wheel, if there is none.")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="only build the wheel and write it to DIR")
    parser.add_argument("--sdist", type=Path, metavar="FILE", help="use this source archive instead of a download")
    parser.add_argument("--constraint", type=Path, metavar="FILE", help="pip constraints for the dependencies")
    parser.add_argument("--force", action="store_true", help="replace an installed detectron2")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0 if detectron2 works or the wheel is written, 1 after an error message."""
    try:
        install(get_parser().parse_args(argv))
    except (InstallError, OSError) as error:
        print(f"[install_detectron2] ERROR: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[install_detectron2] Interrupted. Run it again to continue.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
