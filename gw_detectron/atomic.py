"""Atomic writes: a file appears complete or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success.

    The temporary file lies in the same folder under a name that no other writer uses; after an error it is removed.

    Args:
        path: the file to write or replace.

    Raises:
        OSError: the file cannot be written; the error names ``path``, which is left as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.filename != os.fspath(temporary):
            raise
        raise OSError(error.errno, f"{error.strerror}, so it was not written", os.fspath(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
