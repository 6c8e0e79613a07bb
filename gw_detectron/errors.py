"""Errors that the user can fix, their report, how messages list names, and checks of flags."""

import difflib
import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_FILE_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
_FILE_ERRNOS = (
    errno.ENOSPC,
    errno.EIO,
    errno.EDQUOT,
    errno.EROFS,
    errno.EFBIG,
    errno.ENAMETOOLONG,
)
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "Cannot allocate memory",
    "ALLOC_FAILED",
)
# the beginning of a file that is not what its name says -> what it is, and the fix
_KINDS_OF_FILES = {
    rb"\Z": "an empty file. Fix: fetch it again",
    rb"version https://git-lfs": "a Git LFS pointer. Fix: run git lfs pull",
    # also the message of a server, as <?xml ...?><Error>
    rb"(?is)[\s\xef\xbb\xbf]*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype html|html|head|body|error)": (
        "a web page. Fix: download the file itself"
    ),
}
# what a function of os.path finds
_KINDS_OF_PATHS: dict[Callable[[str], bool], str] = {
    os.path.exists: "file or folder",
    os.path.isfile: "file",
    os.path.isdir: "folder",
}
#: of several scripts; Python calls them not printable
_SPACES_AND_JOINERS = "\N{NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


class UserError(Exception):
    """Base class of errors that the user can fix: ``WHAT (value): why. Fix: what to do.``

    They are reported without a traceback. Subclasses also derive from the built-in error of their kind.
    """


class ConfigError(UserError, ValueError):
    """A config key or flag is unknown, or its value unusable."""


class PreflightError(ConfigError):
    """A run would fail later or learn nothing: one message per problem, and what was not checked because of them."""

    def __init__(self, problems: Iterable[str], unchecked: str = "") -> None:
        self.problems = tuple(problems)
        self.unchecked = unchecked
        super().__init__(self.problems, unchecked)

    def __str__(self) -> str:
        count = len(self.problems)
        head = (
            "this run has a problem:"
            if count == 1
            else f"this run has {count} problems:"
        )
        lines = [f"  - {problem}" for problem in self.problems]
        return "\n".join([head, *lines, self.unchecked]).rstrip("\n")


@dataclass
class CheckReport:
    """All problems and warnings found before a run; what was left out because of problems."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: str = ""

    def raise_errors(self) -> None:
        """Raise :class:`PreflightError` if there is an error."""
        if self.errors:
            raise PreflightError(self.errors, self.unchecked)


class NormError(ConfigError):
    """A norm name cannot be used, or a model cannot be converted to it and is unchanged."""


class DataError(UserError, ValueError):
    """A dataset, an image or its record cannot be used."""


class MissingFileError(UserError, FileNotFoundError):
    """A file that the user named does not exist."""


class FileAccessError(UserError, OSError):
    """A file, folder or address cannot be read, fetched, written or replaced."""


class WeightsError(UserError, ValueError):
    """Weights do not fit the model, have unusable values, or cannot be converted."""


class UnknownNormError(WeightsError):
    """The norm cannot be inferred from the file; pass it explicitly."""


class WeightsFileError(UserError, ValueError):
    """A weight file is damaged or has an unsupported format."""


class RefusedFileError(WeightsFileError):
    """A weight file could run code when it is read, or an address could write outside of the download cache."""


class RunError(UserError, RuntimeError):
    """A run cannot start or go on: the folder is in use, or another process was lost."""


class NonFiniteError(UserError, FloatingPointError):
    """A loss, or a tensor of a whitening layer, became infinite or NaN."""


class ExportError(UserError, ValueError):
    """A model cannot be exported, or the exported file gives other numbers than the model."""


class MissingPackageError(UserError, ImportError):
    """An optional package, or Detectron2, is not installed."""


def is_user_error(error: BaseException) -> bool:
    """Return whether the user can fix an error: UserErrors, unusable files and a full disk."""
    if isinstance(error, (UserError, *_FILE_ERRORS)):
        return True
    return getattr(error, "errno", None) in _FILE_ERRNOS


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was too small, of the CPU or a GPU; torch raises some of it as a RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    message = str(error)
    return any(text in message for text in _OUT_OF_MEMORY)


def message_of(error: BaseException) -> str:
    """Return the message of an error; where a data-loading worker raised it, without the worker's traceback."""
    text = str(error)
    if not re.match(r"Caught \w+ in DataLoader worker", text):
        return text

    kind = type(error).__name__
    _, _, reason = text.rpartition(f"{kind}: ")
    reason = reason.strip()
    return reason if isinstance(error, UserError) else f"{kind}: {reason}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no text."""
    line, _, _ = str(error).strip().partition("\n")
    return line.rstrip(".") or type(error).__name__


def kind_of_file(begin: bytes, others: Mapping[bytes, str] | None = None) -> str:
    """Say what a file is that is not what its name says, and the fix, by its first 1000 bytes; "" if unknown.

    ``others``: further kinds by a pattern of the beginning.
    """
    for pattern, kind in {**_KINDS_OF_FILES, **(others or {})}.items():
        if re.match(pattern, begin):
            return kind
    return ""


def check_minimum(name: str, value: int, minimum: int = 1) -> None:
    """Raise ConfigError unless a value is an integer that is large enough."""
    if not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} ({value!r}): not an integer of {minimum} or more.")


def check_fraction(name: str, value: Any) -> None:
    """Raise ConfigError unless a value is a number between 0 and 1."""
    if type(value) is not float or not 0 < value < 1:
        raise ConfigError(
            f"{name} ({value!r}): not between 0 and 1. Fix: give e.g. 0.1 for a tenth of the images."
        )


def existing_path(name: str, path: str, exists: Callable[[str], bool]) -> str:
    """Return the absolute path of a local file or folder that ``exists``, by os.path; ``name`` is its flag."""
    found = os.path.abspath(os.path.expanduser(path))
    if not exists(found):
        kind = _KINDS_OF_PATHS[exists]
        raise MissingFileError(
            f"{name} ('{path}'): no {kind} '{found}'. Fix: give an existing {kind}."
        )
    return found


def similar_names(name: str, known: Iterable[str]) -> str:
    """Return " Similar: a, b." for the known names nearest to a name in any case, or ""."""
    names = {known_name.lower(): known_name for known_name in known}
    near = difflib.get_close_matches(name.lower(), names, n=3)
    if not near:
        return ""
    return f" Similar: {', '.join(names[key] for key in near)}."


def printable(text: str) -> str:
    """Escape control characters, which could change the terminal, and other characters without a glyph."""
    characters = []
    for character in text:
        if not character.isprintable() and character not in _SPACES_AND_JOINERS:
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)


def summarize_names(names: Iterable[str], limit: int = 4) -> str:
    """Join the first ``limit`` names by commas and count the rest."""
    shown = [printable(name) for name in names]
    summary = ", ".join(shown[:limit])
    if len(shown) > limit:
        summary += f" and {len(shown) - limit} more"
    return summary
