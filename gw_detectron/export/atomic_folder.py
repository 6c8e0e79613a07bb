"""Atomic folder: an export appears complete or not at all."""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError, summarize_names


class OutputFolderError(UserError, FileExistsError):
    """The output folder cannot be created or replaced.

    An export replaces only a folder that holds nothing but files of an export.
    """


@contextmanager
def atomic_folder(output: Path, files: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder that replaces ``output`` on success.

    Args:
        output: the folder to create. It may exist if it is empty or holds only an earlier export of the same kind.
        files: the file names that an export of this kind writes.

    Raises:
        OutputFolderError: ``output`` cannot be created, or holds other files; they are left unchanged.
    """
    output = output.resolve()
    check_replaceable(output, files)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise OutputFolderError(
            f"output ('{output}'): cannot create the folder: {error.strerror}. Fix: give another folder."
        ) from error
    try:
        new, old = work / "new", work / "old"
        new.mkdir()
        yield new
        check_replaceable(output, files)  # another program may have written there in the meantime
        if output.exists():
            os.rename(output, old)
        try:
            os.rename(new, output)
        except OSError:
            if old.exists():
                os.rename(old, output)
            raise
    finally:
        shutil.rmtree(work)


def check_replaceable(output: Path, files: Collection[str]) -> None:
    """Raise OutputFolderError unless ``output`` is absent, empty or holds only ``files``."""
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputFolderError(f"output ('{output}'): is a file. Fix: give a folder.")
    others = sorted(entry.name for entry in output.iterdir() if entry.name not in files)
    if others:
        raise OutputFolderError(
            f"output ('{output}'): the folder holds {summarize_names(others)}, which is not part of an earlier export. "
            "Fix: give an empty or new folder."
        )
