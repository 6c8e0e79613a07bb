"""Errors that the user can fix, how their messages list names, and the check of a minimum."""

import difflib
import errno
from collections.abc import Iterable

_FILE_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_FILE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)


class UserError(Exception):
    """Base class of errors that the user can fix.

    They are reported as one message, without a traceback. Subclasses also derive from the built-in error of their kind,
    e.g. ``class ConfigError(UserError, ValueError)``. The message reads ``WHAT (value): why. Fix: what to do.``
    """


class ConfigError(UserError, ValueError):
    """A config key or flag is unknown, or its value unusable."""


class DataError(UserError, ValueError):
    """A dataset, an image or its record cannot be used."""


class MissingFileError(UserError, FileNotFoundError):
    """A file that the user named does not exist."""


class FileAccessError(UserError, OSError):
    """A file or address cannot be read, fetched or written."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


def is_user_error(error: BaseException) -> bool:
    """Tell whether the user can fix an error.

    Such errors are UserErrors, unusable files and a full disk.
    """
    return isinstance(error, (UserError, *_FILE_ERRORS)) or getattr(error, "errno", None) in _FILE_ERRNOS


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def check_minimum(name: str, value: int, minimum: int = 1) -> None:
    """Raise ConfigError unless a value is an integer that is large enough."""
    if not isinstance(value, int) or value < minimum:
        problem = "too small" if isinstance(value, int) else "not an integer"
        raise ConfigError(f"{name} ({value!r}): {problem}. Fix: give {minimum} or more.")


def similar_names(name: str, known: Iterable[str]) -> str:
    """Return " Similar: a, b." for the known names nearest to a name in any case, or ""."""
    names = {each.lower(): each for each in known}
    near = [names[each] for each in difflib.get_close_matches(name.lower(), names, n=3)]
    return f" Similar: {', '.join(near)}." if near else ""


def printable(text: str) -> str:
    """Escape control characters, which could change the terminal, and other characters without a glyph."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def summarize_names(names: Iterable[str], limit: int = 4) -> str:
    """Join the first ``limit`` names by commas and count the rest."""
    names = list(map(printable, names))
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
