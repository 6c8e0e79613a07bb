"""Atomic writes: a file or folder appears complete or not at all."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import FileAccessError, UserError, summarize_names

_writing: set[str] = set()  # names of the temporary files and folders of this process


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
    with _temporary(path) as temporary:
        try:
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):  # torch wraps a failed write
                cause = cause.__cause__ or cause.__context__
            if isinstance(cause, FileAccessError) or not cause or cause.filename not in (None, os.fspath(temporary)):
                raise
            raise FileAccessError(f"'{path}': was not written: {cause.strerror or cause}. Fix: {fix}.") from error


@contextlib.contextmanager
def atomic_folder(output: str | os.PathLike[str], files: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder that replaces ``output`` on success.

    Args:
        output: the folder to create. It may exist if it is empty or holds only an earlier result of the same kind.
        files: the names of files and folders that a result of this kind has.

    Raises:
        FileAccessError: ``output`` cannot be created, or holds other files; they are left unchanged.
        FileAccessError: the files cannot be written, e.g. on a full disk; ``output`` is left unchanged.
    """
    if not os.fspath(output):
        raise FileAccessError("output (''): no folder is named.")
    output = Path(output).resolve()
    check_replaceable(output, files)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output.parent, output.name)
        with _temporary(output) as work:
            new, old = work / "new", work / "old"
            new.mkdir(parents=True)
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
            f"output ('{output}'): was not written: {error.strerror or error}. Fix: free disk space, or give another "
            "folder."
        ) from error


def check_replaceable(output: Path, files: Collection[str]) -> None:
    """Raise FileAccessError unless ``output`` is absent, empty or holds only ``files``."""
    try:
        others = sorted(set(os.listdir(output)).difference(files))
    except FileNotFoundError:
        return
    except OSError as error:
        raise FileAccessError(f"output ('{output}'): not a folder: {error.strerror}.") from error
    if output.is_mount():
        raise FileAccessError(f"output ('{output}'): no rename replaces a mount point. Fix: give a folder in it.")
    if others:
        raise FileAccessError(
            f"output ('{output}'): the folder holds {summarize_names(others)}, which is not part of an earlier result "
            f"({summarize_names(files, 3)}). Fix: give an empty or new folder."
        )


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside a path, and remove what is there at the end.

    The name is unique per writer and holds the host and the process id, for :func:`remove_unfinished`.
    """
    token = f"{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.name[:100]}.{token}.tmp")
    _writing.add(temporary.name)
    try:
        yield temporary
    finally:
        _remove(temporary)
        _writing.discard(temporary.name)


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
        if found := temporary.fullmatch(path.name):
            process = int(found[1])
            # in a restarted container a run often gets the process id of the killed one
            if not (path.name in _writing if process == os.getpid() else _is_running(process)):
                _remove(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


class AtomicPathManager:
    """An iopath path manager that writes local files atomically.

    It is made for the attribute ``path_manager`` of fvcore's ``Checkpointer``, which opens all its files there: neither
    a full disk nor a kill leaves half a checkpoint. Everything but writing is left to the wrapped path manager.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def open(self, path: str, mode: str = "r", **kwargs: Any) -> contextlib.AbstractContextManager[IO[Any]]:
        """Open a file; use the result in a ``with`` statement, whose end raises FileAccessError."""
        if "w" in mode and "://" not in path:
            return _open_atomic(path, mode)
        return self._manager.open(path, mode, **kwargs)


@contextlib.contextmanager
def _open_atomic(path: str, mode: str) -> Iterator[IO[Any]]:
    fix = "free disk space or get write permission, then continue with --resume"
    with atomic_write(Path(path), fix) as temporary, open(temporary, mode) as file:
        yield file
