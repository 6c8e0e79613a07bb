"""Fetch weights from the Hugging Face hub with its own client, which resumes, caches and follows redirects.

The client reads ``HF_TOKEN`` (and sends it to no other host), ``HF_HUB_OFFLINE`` and the proxy variables.
"""

import os
import re
from pathlib import Path

from ..errors import FileAccessError, MissingPackageError, WeightsError, WeightsFileError, first_line
from .provenance import sha256_of

#: the file of an address without one; ``export_backbone`` writes it
DEFAULT_FILE = "backbone.safetensors"
_ADDRESS = re.compile(r"gw://hf/(?P<repo>[^/@]+/[^/@]+)(/(?P<file>[^@]+))?(@(?P<revision>[^@]+))?")
_SHA256 = re.compile("[0-9a-f]{64}")
_ACCESS = "set HF_TOKEN to a token with access to the repository"
_FIXES = {
    401: f"check owner and repository; if it is private, {_ACCESS}",
    403: f"accept the conditions on its page, and {_ACCESS}",
    404: "check owner, repository, file and revision",
}


def fetch_from_hub(address: str, cache: Path) -> Path:
    """Return the path of a file of the hub; download it if it is new.

    Without a connection the file of an earlier download is returned.

    Args:
        address: ``gw://hf/<owner>/<repo>[/<file>][@<revision>]``. The file ends in ``.safetensors``, the default is
            :data:`DEFAULT_FILE`. The revision is a branch, a tag or a commit, by default ``main``.
        cache: folder of the hub's cache.

    Raises:
        WeightsError: another address, or another kind of file.
        WeightsFileError: the SHA-256 is not the hub's; the file is removed.
        FileAccessError: the file is not in the cache and cannot be downloaded.
        MissingPackageError: huggingface_hub is not installed.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache for the names in the cache.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise WeightsError(
            f"weights ({address!r}): incomplete address. Fix: give gw://hf/<owner>/<repo>[/<file>][@<revision>]."
        )
    file = found["file"] or DEFAULT_FILE
    if not file.endswith(".safetensors"):
        raise WeightsError(
            f"weights ({address!r}): not a safetensors file; other formats can run code. Fix: give the path of a "
            ".safetensors file in the repository."
        )
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError as error:
        raise MissingPackageError(
            f'weights ({address!r}): huggingface_hub is not installed. Fix: run pip install "gw-detectron[weights]".'
        ) from error
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        path = hf_hub_download(found["repo"], file, revision=found["revision"], cache_dir=cache, endpoint=endpoint)
    except (OSError, errors.HTTPError) as error:  # of httpx or requests, by the client's version
        raise _not_fetched(address, error) from error
    except ValueError as error:  # the client's check of the name
        raise WeightsError(f"weights ({address!r}): {first_line(error)}. Fix: give another name.") from None
    _check_hash(address, Path(path))
    return Path(path)


def _not_fetched(address: str, error: Exception) -> FileAccessError:
    causes = [error, *filter(None, [error.__cause__])]
    statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in causes]
    fix = next((_FIXES[status] for status in statuses if status in _FIXES), "check the connection and HF_ENDPOINT")
    reason = next((f"status {status}" for status in statuses if status), " ".join(str(causes[-1]).split()).rstrip("."))
    return FileAccessError(
        f"weights ({address!r}): not in the cache, and the download failed: {reason}. Fix: {fix}; or download the file "
        "elsewhere and give gw://file/<path>."
    )


def _check_hash(address: str, path: Path) -> None:
    """Compare a file with the hub's SHA-256, by which the cache names large files."""
    blob = path.parent / os.readlink(path) if path.is_symlink() else path
    if _SHA256.fullmatch(blob.name) and (digest := sha256_of(path)) != blob.name:
        path.unlink()
        blob.unlink()
        raise WeightsFileError(
            f"weights ({address!r}): the SHA-256 is {digest}, the hub's is {blob.name}: the transfer was damaged. "
            "Fix: try again."
        )
