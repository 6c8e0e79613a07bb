"""Atomic writes: a file or folder appears complete or not at all."""

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import FileAccessError, OutputFolderError, UserError, summarize_names

_IMPORTED = time.time()


@contextlib.contextmanager
def atomic_write(path: Path, fix: str = "free disk space or get write permission, then try again") -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success.

    Its content is on the disk before the rename. After an error the temporary file is removed; after a kill,
    :func:`remove_unfinished` does it.

    Args:
        path: the file to write or replace.
        fix: the advice in the error message.

    Raises:
        FileAccessError: the file cannot be written; the error names ``path``, which is left as it was.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        cause = _os_error(error)
        if cause is None or isinstance(cause, FileAccessError) or cause.filename not in (None, os.fspath(temporary)):
            raise
        raise FileAccessError(
            f"'{path}': was not written: {cause.strerror or cause}. Existing files are unchanged. Fix: {fix}."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _os_error(error: BaseException | None) -> OSError | None:
    """Find the OSError behind an error.

    torch wraps a failed write in a RuntimeError.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextlib.contextmanager
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
            f"output ('{output}'): the folder holds {summarize_names(others)}, which is not part of an earlier result "
            f"({summarize_names(files, 3)}). Fix: give an empty or new folder."
        )


def temporary_path(path: Path) -> Path:
    """Return a hidden name beside a file or folder.

    The name is unique per writer and holds the host and the process id, for :func:`remove_unfinished`.
    """
    return path.with_name(f".{path.name[:100]}.{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def remove_unfinished(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove temporary files and folders that killed processes left in a folder.

    Those of running processes and of other machines stay.

    Args:
        folder: the folder that holds the temporary files.
        name: remove only those of the file or folder of this name; None: all.
    """
    start = ".+" if name is None else re.escape(name[:100])
    temporary = re.compile(rf"\.{start}\.{re.escape(os.uname().nodename)}\.(\d+)\.[0-9a-f]{{8}}\.tmp")
    for path in Path(folder).glob(".*.tmp"):
        found = temporary.fullmatch(path.name)
        if found and not _is_being_written(path, int(found[1])):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_being_written(path: Path, process_id: int) -> bool:
    if process_id == os.getpid():
        # In a restarted container a run often gets the host name and the process id of the killed one.
        with contextlib.suppress(OSError):
            return path.stat().st_mtime > _IMPORTED - 1
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True


class AtomicPathManager:
    """An iopath path manager that writes local files atomically.

    It is made for the attribute ``path_manager`` of fvcore's ``Checkpointer``, which opens all its files there: neither
    a full disk nor a kill leaves half a checkpoint. Everything but writing is left to the wrapped path manager.

    Args:
        manager: the path manager to wrap.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def open(self, path: str, mode: str = "r", **kwargs: Any) -> contextlib.AbstractContextManager[IO[Any]]:
        """Open a file; use the result in a ``with`` statement.

        Raises:
            FileAccessError: at the end of the ``with`` statement, when the file could not be written.
        """
        if "w" in mode and "://" not in path:
            return _open_atomic(path, mode)
        return self._manager.open(path, mode, **kwargs)


@contextlib.contextmanager
def _open_atomic(path: str, mode: str) -> Iterator[IO[Any]]:
    fix = "free disk space or get write permission, then continue with --resume"
    with atomic_write(Path(path), fix) as temporary, open(temporary, mode) as file:
        yield file
