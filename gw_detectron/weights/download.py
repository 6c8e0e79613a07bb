"""Download a file, also from Google Drive; resume after a failure."""

import os
import re
from pathlib import Path

from ..errors import FileAccessError


def download(
    url: str,
    path: str | os.PathLike[str],
    *,
    timeout: tuple[float, float] = (20.0, 60.0),
    retries: int = 4,
) -> None:
    """Download a file; resume an earlier attempt.

    An incomplete file is kept beside the target, as ``<name><8 characters>.part``. A server that declares too short a
    length goes unnoticed here: check the content, or its hash.

    Args:
        url: http or https; Google Drive's confirmation pages are handled.
        path: the file to write.
        timeout: seconds to wait for a connection, and for the next byte.
        retries: further attempts after a broken or stalled transfer.

    Raises:
        FileAccessError: the server did not send the complete file, or gdown is missing.
        OSError: the folder cannot be written, or the disk is full.
    """
    try:
        import gdown
        from requests import RequestException
    except ImportError as error:
        raise _failed(url, error, fix='run pip install "gw-detectron[weights]".') from error

    path = Path(path)
    for part in _parts(path)[1:]:
        part.unlink()  # of parallel downloads; only one can be resumed
    while True:
        resumed = bool(_parts(path))
        try:
            gdown.download(url, str(path), resume=True, use_cookies=False, timeout=timeout, retries=retries)
            return
        except gdown.exceptions.DownloadError as error:
            if not (resumed and "byte range" in str(error)):
                raise _failed(url, error) from None
            for part in _parts(path):
                part.unlink()  # the server cannot resume it: start again
        except RequestException as error:
            raise _failed(url, error) from None


def _parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}{'?' * 8}.part"), key=lambda part: part.stat().st_size, reverse=True)


def _failed(url: str, error: object, fix: str = "try again; the download resumes.") -> FileAccessError:
    reason = str(error).partition(".\nThe received bytes")[0]  # the rest is about gdown's own command line
    reason = re.sub(r'^.*port=\d+\): (.*?)(?:"\)\))?$', r"\1", " ".join(reason.split()))  # urllib3's innermost cause
    return FileAccessError(f"{url!r}: download failed: {reason.rstrip('.')}. Fix: {fix}")
