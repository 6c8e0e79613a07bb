"""Atomic writes: a file or folder appears complete or not at all."""

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from .errors import FileAccessError, UserError, is_user_error, summarize_names


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success.

    Its content is on the disk before the rename. After an error the temporary file is removed; after a kill
    it stays. If it cannot be written, a FileAccessError names ``path``.
    """
    with _temporary(path) as temporary:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """Write a json file atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def atomic_folder(
    output: str | os.PathLike[str], files: Sequence[str]
) -> Iterator[Path]:
    """Yield an empty folder that replaces ``output`` on success.

    ``output`` may hold an earlier result of the same kind: see :func:`check_replaceable`. If it holds other files or
    cannot be written it is left unchanged, and a FileAccessError is raised.
    """
    output = Path(output).resolve()
    check_replaceable(output, files)
    with _temporary(output) as work:
        new = work / "new"
        old = work / "old"
        new.mkdir(parents=True)
        yield new

        if output.exists():
            os.rename(output, old)
        try:
            os.rename(new, output)
        except BaseException:  # also a signal: ``work`` is removed with both
            if old.exists():
                os.rename(old, output)
            raise


def check_replaceable(output: Path, files: Sequence[str]) -> None:
    """Raise FileAccessError if ``output`` holds more than a result of these ``files``; every result has the first."""
    present = set(os.listdir(output)) if output.exists() else set()
    lacks = ""
    if present.isdisjoint(files[:1]):
        lacks = f" but no {files[0]}" if files else ""
        files = ()
    others = present.difference(files)
    if others:
        raise FileAccessError(
            f"output ('{output}'): the folder holds {summarize_names(sorted(others))}{lacks}, so it is not an earlier "
            "result. Fix: give an empty or new folder."
        )


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a hidden name beside a path; remove what is there at the end."""
    # a character has up to 4 bytes, a name up to 255
    temporary = path.with_name(f".{path.name[:60]}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    except Exception as error:
        cause = _os_error(error)
        if cause is None or isinstance(cause, UserError) or not is_user_error(cause):
            raise

        # an error of writing to an open file has no name; any other name is of a file that the caller reads
        named = os.fspath(cause.filename or temporary)
        if named != os.fspath(path) and not named.startswith(os.fspath(temporary)):
            raise

        fix = "free disk space or get write permission, then run again"
        if cause.errno == errno.ENAMETOOLONG:
            fix = "give a shorter name"
        raise FileAccessError(
            f"'{path}': was not written: {cause.strerror or cause}. Fix: {fix}."
        ) from error
    finally:
        _remove(temporary)


def _os_error(error: BaseException) -> OSError | None:
    """Return the error of the operating system behind an error: torch wraps a failed write."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Remove temporary files that killed processes left in a folder, which this process has locked."""
    for path in Path(folder).glob(f".*.{'[0-9a-f]' * 8}.tmp"):
        _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # not a file, or removed
        path.unlink()


class AtomicPathManager:
    """An iopath path manager that writes local files atomically.

    As the ``path_manager`` of fvcore's ``Checkpointer`` it leaves no half checkpoint on a full disk or after a kill.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    @contextlib.contextmanager
    def open(self, path: str, mode: str = "r", **kwargs: Any) -> Iterator[IO[Any]]:
        """Open a file; the end of the ``with`` statement raises FileAccessError if it was not written."""
        if "w" in mode and "://" not in path:
            with atomic_write(Path(path)) as temporary, open(temporary, mode) as file:
                yield file
        else:
            with self._manager.open(path, mode, **kwargs) as file:
                yield file
