"""One training at a time in an output folder."""

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from typing import IO

from ..errors import OutputInUseError

log = logging.getLogger(__name__)

_FILE = ".training.lock"
_held: dict[tuple[int, str], IO[str]] = {}  # by process: a forked one does not hold the locks of its parent


def lock_output(folder: str) -> None:
    """Refuse a second training in an output folder, until this process ends.

    The lock is a POSIX one, which ends with the process, also with a killed one, and is not inherited by data-loading
    workers. It works between machines where the file system supports it. A second call in one process changes nothing.

    Raises:
        OutputInUseError: another process holds the lock.
        OSError: the folder cannot be written.
    """
    key = (os.getpid(), os.path.realpath(folder))
    if "://" in folder or key in _held:
        return
    os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(os.path.join(folder, _FILE), "a+"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                holder = file.read().strip() or "just started"
                raise OutputInUseError(
                    f"OUTPUT_DIR ('{folder}'): another training writes there ({holder}). Fix: give another folder, or "
                    "wait for that training or stop it."
                ) from None
            log.warning(f"OUTPUT_DIR ('{folder}'): its file system has no locks ({error}): start one training only")
            return
        file.truncate(0)
        file.write(f"host {os.uname().nodename}, process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        stack.pop_all()  # closing the file would end the lock
    _held[key] = file


@contextlib.contextmanager
def output_unlocked_at_end() -> Iterator[None]:
    """Release the locks that the body takes; also a decorator."""
    before = set(_held)
    try:
        yield
    finally:
        for key in set(_held) - before:
            _held.pop(key).close()
