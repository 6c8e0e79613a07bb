"""Atomic folder: a result appears complete or not at all."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..atomic import remove_unfinished, temporary_path
from ..errors import FileAccessError, OutputFolderError, UserError, summarize_names


@contextmanager
def atomic_folder(output: str | os.PathLike[str], files: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder that replaces ``output`` on success.

    Folders that killed runs to the same place left are removed.

    Args:
        output: the folder to create. It may exist if it is empty or holds only an earlier result of the same kind.
        files: the names of files and folders that a result of this kind has.

    Raises:
        OutputFolderError: ``output`` cannot be created, or holds other files; they are left unchanged.
        FileAccessError: the files cannot be written, e.g. on a full disk; ``output`` is left unchanged.
    """
    if not os.fspath(output):
        raise OutputFolderError("output (''): no folder is named. Fix: give a folder.")
    output = Path(output).resolve()
    try:
        check_replaceable(output, files)
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output.parent, output.name)
        work = temporary_path(output)
        work.mkdir()
    except UserError:
        raise
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
        except BaseException:  # also a signal: ``work`` is removed with both
            if old.exists():
                os.rename(old, output)
            raise
    except UserError:
        raise
    except OSError as error:
        raise FileAccessError(
            f"output ('{output}'): was not written: {error.strerror or error}. Existing files are unchanged. Fix: free "
            "disk space, or give another folder."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_replaceable(output: Path, files: Collection[str]) -> None:
    """Raise OutputFolderError unless ``output`` is absent, empty or holds only ``files``."""
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputFolderError(f"output ('{output}'): is a file. Fix: give a folder.")
    if output.is_mount():
        why = "is a mount point, which no rename replaces"
        raise OutputFolderError(f"output ('{output}'): {why}. Fix: give a folder in it.")
    others = sorted(entry.name for entry in output.iterdir() if entry.name not in files)
    if others:
        raise OutputFolderError(
            f"output ('{output}'): the folder holds {summarize_names(others)}, which is not part of an earlier result. "
            "Fix: give an empty or new folder."
        )
