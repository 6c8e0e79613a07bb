"""Fetch weights by their addresses, without leaving the download cache.

``gw://imagenet/<name>`` are the authors' weights, for ``MODEL.WEIGHTS``. Files are downloaded once
and converted once, into the folder ``gw_detectron`` of Detectron2's cache (``$FVCORE_CACHE``, else
``~/.torch/iopath_cache``). Environment variables:

- ``GW_DETECTRON_WEIGHTS``: a folder with the authors' files; they are not downloaded then.
- ``GW_DETECTRON_MIRROR``: a base URL of the authors' files, instead of Google Drive.
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from detectron2.utils.file_io import PathHandler, PathManager
from iopath.common.file_io import HTTPURLHandler, file_lock, get_cache_dir

from ..atomic import write_text
from ..errors import (
    FileAccessError,
    MissingFileError,
    RefusedFileError,
    UnknownNormError,
    UserError,
    WeightsError,
    WeightsFileError,
    first_line,
)
from ..installation import __version__, require_packages
from .converting import convert_file
from .reading import sha256_of

#: host of detectron2:// and catalog://, whose files the cache may hold already
_DETECTRON2_HOST = "dl.fbaipublicfiles.com"
_PREFIX = "gw://"
_FOLDER_VARIABLE = "GW_DETECTRON_WEIGHTS"
_MIRROR_VARIABLE = "GW_DETECTRON_MIRROR"
_GW = "GW:groups=64,iters=5,eps=0"  # the released layer adds no eps
_GN = "GN:groups=64"
_LICENSE = "The authors state no license of the weights (their code is BSD-2-Clause)."


def local_path(address: str, key: str) -> str:
    """Resolve an address to a file on this machine; fetch the file if needed.

    Arguments and errors: see :func:`gw_detectron.weights.open_checkpoint`.
    """
    check_address(address)
    try:
        path = PathManager.get_local_path(address)
    except UserError:
        raise
    # RuntimeError: Detectron2's catalog lacks it
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise FileAccessError(
            f"{key}: cannot fetch '{address}': {error}. Fix: give the path of a file or a known "
            "address."
        ) from error

    if not os.path.exists(path):  # also of an unknown scheme
        fix = "give an existing path or gw://imagenet/R-50."
        if address.startswith("weights/"):  # in the configs
            fix = "put your own weights there (none are published under weights/), see MODEL_ZOO.md."
        raise MissingFileError(
            f"{key}: file not found: '{address}' (cwd: {os.getcwd()}). Fix: {fix}"
        )
    return path


def refetch_hint(address: str) -> str:
    """Return how to fetch an address again whose file in the download cache is bad, or ""."""
    if "://" not in address:
        return ""
    path = os.path.realpath(PathManager.get_local_path(address))
    if not Path(path).is_relative_to(os.path.realpath(get_cache_dir())):
        return ""
    return f" To fetch '{address}' again, delete '{path}'."


def check_address(address: str) -> None:
    """Raise RefusedFileError if a remote address has ``..`` between slashes, in any spelling.

    Path handlers join the path of an address to a cache folder. With ``..`` they would write
    outside of it, for example a ``.pth`` file beside Python's packages, which Python runs. Spaces and
    control characters are refused, too: Python leaves some out of an address, as in ``.\\t.``.
    """
    if "://" not in address:
        return
    if not address.isprintable() or " " in address:
        raise RefusedFileError(
            f"address ({address!a}): has a space or a control character. Fix: write a space as %20."
        )

    plain = unquote(address)
    while plain != unquote(plain):
        plain = unquote(plain)
    if ".." in re.split(r"[/\\?#&;=]", plain):
        raise RefusedFileError(
            f"address ('{address}'): '..' could leave the download cache. Fix: leave out '..'."
        )


class CachedURLHandler(HTTPURLHandler):
    """Download into the cache of iopath only, with a folder for each scheme and host.

    iopath's own handler follows ``..`` and links out of the cache, and takes a file from one host
    for the file of the same path on another host, and one from ``http://`` for one from ``https://``.
    """

    def _get_local_path(
        self,
        path: str,
        force: bool = False,
        cache_dir: str | None = None,
        **kwargs: Any,
    ) -> str:
        check_address(path)
        url = urlsplit(path)
        cache = get_cache_dir(cache_dir)
        folder = cache
        if (url.scheme, url.hostname) != ("https", _DETECTRON2_HOST):
            schemes = "urls" if url.scheme == "https" else f"urls_{url.scheme}"
            host = re.sub(r"[^\w.-]", "_", url.netloc)
            folder = os.path.join(cache, schemes, host)

        name = path.split("/")[-1]
        target = os.path.join(folder, os.path.dirname(url.path.lstrip("/")), name)
        root = os.path.realpath(folder)
        if os.path.commonpath([root, os.path.realpath(target)]) != root:
            raise RefusedFileError(
                f"address ('{path}'): leads out of its folder '{root}' in the download cache. Fix: "
                "set FVCORE_CACHE to a folder without links."
            )
        return super()._get_local_path(path, force, folder, **kwargs)


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that the authors published.

    The authors give no hash: the first download's is recorded in the cache, and later downloads
    must match it.

    Source: README of the authors' repository. XBNBlock (CVPR 2022): readme and
        ``experiments/ResNet50_XBNBlock_P2.sh`` of https://github.com/huangleiBuaa/XBNBlock.
    """

    file: str  # its name in the cache, in a local folder, on a mirror
    drive_id: str
    norm: str

    @property
    def url(self) -> str:
        mirror = os.environ.get(_MIRROR_VARIABLE)
        if mirror:
            return f"{mirror.rstrip('/')}/{self.file}"
        return f"https://drive.google.com/uc?id={self.drive_id}"


CATALOG: Mapping[str, PublishedWeights] = {
    f"imagenet/{name}": PublishedWeights(f"{file}-S1-B2.pth", drive_id, norm)
    for name, file, drive_id, norm in (
        ("R-50", "R-50-GW", "1bNeTDhfu5jg8aBatOCSQAe_WzTouUfHA", _GW),
        ("R-101", "R-101-GW", "1BnuzZzpaQ6rgBHho5mOQhBWBh1Lh-trK", _GW),
        ("X-50-32x4d", "X-50-32x4d-GW", "1pJSIbjeHpELJ5zlWOF6ekRGjykRYf6tO", _GW),
        ("X-101-32x8d", "X-101-32x8d-GW", "1lVAvTSCnHs-Ij5gt7ubQvLmZzUQdKUNt", _GW),
        # GN in place of GW: XBNBlock, trained as GW was ("standard") and with the authors'
        # "advanced" recipe
        ("R-50-GN64", "R-50-GN64", "1xqGsCDD4Y_rv6PjTtACAs8D918fjUT55", _GN),
        (
            "R-50-GN64-advanced",
            "R-50-GN64-advanced",
            "1pHRhjc67M5wki5fWy44SG5lj06q71gat",
            _GN,
        ),
    )
}


def local_weights(name: str) -> Path:
    """Return the path of converted weights; download and convert them if needed."""
    address = _PREFIX + name
    if name not in CATALOG:
        known = ", ".join(_PREFIX + known_name for known_name in CATALOG)
        raise WeightsError(f"weights ({address!r}): unknown name. Fix: give {known}.")
    cache = Path(get_cache_dir()) / "gw_detectron"
    with file_lock(str(cache / CATALOG[name].file)):
        return _published_weights(address, CATALOG[name], cache)


def _published_weights(address: str, weights: PublishedWeights, cache: Path) -> Path:
    target = cache / weights.file.replace(".pth", f"-{__version__}.pkl")
    folder = os.environ.get(_FOLDER_VARIABLE)
    if target.is_file() and not folder:
        return target

    source = Path(folder or cache) / weights.file
    is_new = not source.is_file()
    if is_new and folder:
        raise MissingFileError(
            f"{_FOLDER_VARIABLE} ({folder!r}): {weights.file} not found, needed for {address}. "
            f"Fix: save {weights.url} there under that name, or unset {_FOLDER_VARIABLE}."
        )
    if is_new:
        _download(address, weights, source)

    record = cache / f"{weights.file}.sha256"
    is_recorded = record.is_file()
    digest = sha256_of(source)
    expected = record.read_text(errors="replace").strip() if is_recorded else digest
    if digest != expected:
        raise WeightsFileError(
            f"{str(source)!r}: checksum mismatch: expected {expected!r}, got {digest!r}. Fix: "
            f"restore the file, or delete {record} to accept the new one."
        )

    # without a record, the source may be a new one
    if not (target.is_file() and is_recorded):
        try:
            convert_file(source, target, overwrite=True, norm=weights.norm)
        except (UnknownNormError, WeightsFileError) as error:
            if is_new:
                source.unlink()
            raise WeightsFileError(f"{address} ({weights.url!r}): {error}") from None
    write_text(record, digest)
    return target


def _download(address: str, weights: PublishedWeights, path: Path) -> None:
    """Download a file with gdown, which resumes and follows Google Drive's confirmations."""
    require_packages(address, "gdown")
    import gdown
    from requests import RequestException

    url = weights.url
    logging.getLogger(__name__).info("Downloading %s to %s. %s", url, path, _LICENSE)
    try:
        gdown.download(
            url,
            str(path),
            resume=True,
            use_cookies=False,
            timeout=(20.0, 60.0),
            retries=4,
        )
    except (gdown.exceptions.DownloadError, RequestException) as error:
        raise FileAccessError(
            f"{address}: not in the cache, and the download of {url} failed: {first_line(error)}. "
            f"Fix: try again (it resumes {path}*.part); or save the file as {path}; or set "
            f"{_FOLDER_VARIABLE} to a folder with {weights.file}, or {_MIRROR_VARIABLE} to its "
            "base URL."
        ) from None


class WeightsHandler(PathHandler):
    """Resolve ``gw://`` addresses for Detectron2."""

    def _get_supported_prefixes(self) -> list[str]:
        return [_PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        self._check_kwargs(kwargs)
        return str(local_weights(path.removeprefix(_PREFIX)))

    def _open(
        self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any
    ) -> IO[Any]:
        return open(self._get_local_path(path), mode, buffering, **kwargs)


def register_weights() -> None:
    """Register ``gw://``, and downloads that stay in the cache, with Detectron2's PathManager."""
    for handler in (WeightsHandler(), CachedURLHandler()):
        PathManager.register_handler(handler, allow_override=True)
