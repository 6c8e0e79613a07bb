"""Fetches a file from the web: with a progress bar, resumed where it broke off, there whole or not at all."""

import os
from pathlib import Path

_CONNECT_SECONDS, _STALL_SECONDS = 20.0, 60.0
_RETRIES = 4


class DownloadFailedError(OSError):
    """A file could not be fetched; what did arrive is kept, and the next try goes on from there."""


def download(
    url: str,
    path: str | os.PathLike[str],
    *,
    timeout: tuple[float, float] = (_CONNECT_SECONDS, _STALL_SECONDS),
    retries: int = _RETRIES,
) -> None:
    """Fetches a file, also one that Google Drive asks about before it hands it over.

    What has arrived stays beside the target, as ``<name><8 characters>.part``, until all has. A file that the server
    declares shorter than it is cannot be told from a whole one here: check the content, or its hash.

    Args:
        url: http or https.
        path: where the file is to be.
        timeout: seconds to wait for a connection, and for the next byte.
        retries: further tries after a broken or stalled transfer.

    Raises:
        DownloadFailedError: the server did not give the whole file.
        OSError: the folder cannot be written, or the disk is full.
    """
    # both take a while, and only who downloads needs them
    import gdown
    from requests import RequestException

    path = Path(path)
    for part in _parts(path)[1:]:
        part.unlink()  # of downloads that ran at the same time; one can be gone on from
    while True:
        resumed = bool(_parts(path))
        try:
            gdown.download(url, str(path), resume=True, use_cookies=False, timeout=timeout, retries=retries)
            return
        except gdown.exceptions.DownloadError as error:
            if not (resumed and "byte range" in str(error)):
                raise _failed(url, error) from None
            for part in _parts(path):
                part.unlink()  # the server cannot, or will no longer, give the rest of this: from the beginning
        except RequestException as error:
            raise _failed(url, error) from None


def _parts(path: Path) -> list[Path]:
    found = [
        part
        for part in path.parent.glob(f"{path.name}*.part")
        if len(part.name) == len(path.name) + len("12345678.part")
    ]
    return sorted(found, key=lambda part: part.stat().st_size, reverse=True)


def _failed(url: str, error: Exception) -> DownloadFailedError:
    said = str(error).partition(".\nThe received bytes")[0]  # what follows is about gdown's own command line
    return DownloadFailedError(f"{url} was not fetched: {' '.join(said.split())}")
