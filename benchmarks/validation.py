"""Check the user's input before minutes are spent on measurements."""

import os
import tempfile
from collections.abc import Collection
from pathlib import Path

from gw_detectron.errors import ConfigError, FileAccessError


def check_names(kind: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Raise ConfigError unless there are names and all are allowed."""
    fix = f"Fix: use {', '.join(allowed)}."
    if not names:
        raise ConfigError(f"{kind}: none given. {fix}")
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{kind} ({name!r}): unknown. {fix}")


def output_paths(output: Path, reference: str | os.PathLike[str] | None = None) -> tuple[Path, Path]:
    """Return the paths of a run's table and plot; create their folder.

    Args:
        output: the paths without suffix.
        reference: an existing table that must not be overwritten.

    Raises:
        ConfigError: ``output`` has no file name, or is the reference.
        FileAccessError: the files cannot be written.
    """
    if output.name in ("", ".."):
        raise ConfigError(f"--output ({str(output)!r}): no file name. Fix: give a path as output/benchmark/layer.")
    table, plot = (output.with_name(output.name + suffix) for suffix in (".csv", ".png"))
    if reference is not None and table.exists() and table.samefile(reference):
        raise ConfigError(f"--output ({str(table)!r}): is the table to compare with. Fix: give another path.")
    for path in (table, plot):
        if path.is_dir():
            raise FileAccessError(f"--output ({str(path)!r}): is a folder. Fix: give another path.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # as long as the temporary names of atomic_write
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{table.name}.", suffix=".check.tmp"):
            pass
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        raise FileAccessError(f"--output ({str(table)!r}): {reason}. Fix: give another path.") from None
    return table, plot
