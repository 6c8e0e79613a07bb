"""All errors that the user can fix, how their messages list names, and the check of a minimum."""

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


class PreflightError(ConfigError):
    """A run would fail later or learn nothing.

    Args:
        problems: one message per problem.
        unchecked: what was not checked because of them.
    """

    def __init__(self, problems: Iterable[str], unchecked: str = "") -> None:
        self.problems = tuple(problems)
        self.unchecked = unchecked
        super().__init__(self.problems, unchecked)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "this run has a problem:" if count == 1 else f"this run has {count} problems:"
        lines = [head, *(f"  - {problem}" for problem in self.problems)]
        return "\n".join([*lines, self.unchecked] if self.unchecked else lines)


class ConversionError(UserError, ValueError):
    """A model cannot be converted. It is unchanged."""


class NormError(ConfigError):
    """A norm name cannot be used, or a layer has none."""


class DataError(UserError, ValueError):
    """A dataset, an image or its record cannot be used."""


class RecordError(DataError):
    """A record of a dataset cannot be used.

    The message names the image file.
    """

    def __init__(self, message: str) -> None:
        # A worker process of a DataLoader passes its traceback as the message, which ends in the original message.
        super().__init__(message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip())


class MissingFileError(UserError, FileNotFoundError):
    """A file that the user named does not exist."""


class FileAccessError(UserError, OSError):
    """A file or address cannot be read, fetched or written."""


class WeightsFileError(UserError, ValueError):
    """A weight file is damaged or has an unsupported format."""


class RefusedFileError(WeightsFileError):
    """A weight file could run code when it is read."""


class InvalidWeightsError(UserError, ValueError):
    """A checkpoint contains weights with values or types that no model can use."""


class NormMismatchError(UserError, ValueError):
    """A checkpoint was trained with other norms than the model has."""


class PartialLoadError(UserError, ValueError):
    """A checkpoint left a part of the backbone at random values."""


class WeightsError(UserError, ValueError):
    """Weights, or options of their conversion, that cannot be used."""


class UnknownNormError(WeightsError):
    """Neither notes nor tensors prove a norm, so the user must state it."""


class WeightsExistError(UserError, FileExistsError):
    """A file would be overwritten."""


class OutputInUseError(UserError, RuntimeError):
    """Another training writes to the output folder."""


class RunMemoryError(UserError, MemoryError):
    """A step or an evaluation ran out of memory."""


class DataWorkerError(UserError, RuntimeError):
    """A data-loading worker was killed, or had no shared memory."""


class LostProcessError(UserError, ConnectionError):
    """Another process of the run ended or does not answer."""


class NonFiniteError(UserError, FloatingPointError):
    """The loss became infinite or NaN; the message names the cause."""


class NonFiniteLayerError(UserError, FloatingPointError):
    """A tensor of a whitening layer is not finite."""


class NonFiniteCovarianceError(UserError, FloatingPointError, ValueError):
    """A covariance matrix holds NaN or infinity, so it has no eigenvalues."""


class ExportError(UserError, ValueError):
    """The model or an argument cannot be exported."""


class ParityError(ExportError):
    """The exported file gives other numbers than the model."""


class OutputFolderError(UserError, FileExistsError):
    """The output folder cannot be created or replaced.

    Only a folder that holds nothing but files of an earlier result is replaced.
    """


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


class MissingDetectron2Error(UserError, ImportError):
    """A part of the package that needs Detectron2 is imported without it."""


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
