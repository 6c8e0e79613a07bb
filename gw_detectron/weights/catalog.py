"""The authors' weights by address, ``gw://imagenet/<name>``, for ``MODEL.WEIGHTS``.

Files are downloaded once and converted once, into the folder ``gw_detectron`` of Detectron2's cache
(``$FVCORE_CACHE``, else ``~/.torch/iopath_cache``). Environment variables:

- ``GW_DETECTRON_WEIGHTS``: a folder with the authors' files; they are not downloaded then.
- ``GW_DETECTRON_MIRROR``: a base URL of the authors' files, instead of Google Drive.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from detectron2.utils.file_io import PathHandler, PathManager
from iopath.common.file_io import file_lock, get_cache_dir

from ..atomic import atomic_write
from ..errors import (
    FileAccessError,
    MissingFileError,
    UnknownNormError,
    WeightsError,
    WeightsFileError,
    first_line,
)
from ..installation import __version__, require_packages
from .addresses import CachedURLHandler
from .conversion import convert_file
from .reading import sha256_of

PREFIX = "gw://"
FOLDER_VARIABLE = "GW_DETECTRON_WEIGHTS"
MIRROR_VARIABLE = "GW_DETECTRON_MIRROR"
_GN64 = "GN:groups=64"
_LICENSE = "The authors state no license of the weights (their code is BSD-2-Clause)."


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that the authors published.

    The authors give no hash: the first download's is recorded in the cache, and later downloads must match it.

    Source: README of the authors' repository. XBNBlock (CVPR 2022): readme and
        ``experiments/ResNet50_XBNBlock_P2.sh`` of https://github.com/huangleiBuaa/XBNBlock.
    """

    architecture: str
    drive_id: str
    positions: str = "S1-B2"
    norm: str = "GW:groups=64,iters=5,eps=0"  # the released layer of GW adds no eps
    label: str = "GW"  # in file names and in the names of other weights than GW's

    @property
    def name(self) -> str:
        return f"imagenet/{self.architecture}" + (
            f"-{self.label}" if self.label != "GW" else ""
        )

    @property
    def file(self) -> str:
        """File name in the cache, in a local folder, on a mirror."""
        return f"{self.architecture}-{self.label}-{self.positions}.pth"

    @property
    def url(self) -> str:
        mirror = os.environ.get(MIRROR_VARIABLE)
        return (
            f"{mirror.rstrip('/')}/{self.file}"
            if mirror
            else f"https://drive.google.com/uc?id={self.drive_id}"
        )


CATALOG: Mapping[str, PublishedWeights] = {
    weights.name: weights
    for weights in (
        PublishedWeights("R-50", "1bNeTDhfu5jg8aBatOCSQAe_WzTouUfHA"),
        PublishedWeights("R-101", "1BnuzZzpaQ6rgBHho5mOQhBWBh1Lh-trK"),
        PublishedWeights("X-50-32x4d", "1pJSIbjeHpELJ5zlWOF6ekRGjykRYf6tO"),
        PublishedWeights("X-101-32x8d", "1lVAvTSCnHs-Ij5gt7ubQvLmZzUQdKUNt"),
        # GN in place of GW: XBNBlock, trained as GW was ("standard") and with the authors' "advanced" recipe
        PublishedWeights("R-50", "1xqGsCDD4Y_rv6PjTtACAs8D918fjUT55", norm=_GN64, label="GN64"),
        PublishedWeights(
            "R-50", "1pHRhjc67M5wki5fWy44SG5lj06q71gat", norm=_GN64, label="GN64-advanced"
        ),
    )
}


def local_weights(name: str) -> Path:
    """Return the path of converted weights; download and convert them if needed."""
    cache = Path(get_cache_dir()) / "gw_detectron"
    if name not in CATALOG:
        known = ", ".join(PREFIX + known_name for known_name in CATALOG)
        raise WeightsError(f"weights ({PREFIX + name!r}): unknown name. Fix: give {known}.")
    with file_lock(str(cache / CATALOG[name].file)):
        return _published_weights(CATALOG[name], cache)


def _published_weights(weights: PublishedWeights, cache: Path) -> Path:
    target = cache / weights.file.replace(".pth", f"-{__version__}.pkl")
    folder = os.environ.get(FOLDER_VARIABLE)
    if target.is_file() and not folder:
        return target
    source = Path(folder or cache) / weights.file
    fetched = not source.is_file()
    if fetched and folder:
        raise MissingFileError(
            f"{FOLDER_VARIABLE} ({folder!r}): {weights.file} not found, needed for {PREFIX}{weights.name}. Fix: save "
            f"{weights.url} there under that name, or unset {FOLDER_VARIABLE}."
        )
    if fetched:
        _download(weights, source)
    digest, recorded = sha256_of(source), cache / f"{weights.file}.sha256"
    if (
        recorded.is_file()
        and (expected := recorded.read_text(errors="replace").strip()) != digest
    ):
        raise WeightsFileError(
            f"{str(source)!r}: checksum mismatch: expected {expected!r}, got {digest!r}. Fix: restore the file, or "
            f"delete {recorded} to accept the new one."
        )
    if not (
        target.is_file() and recorded.is_file()
    ):  # without a record, the source may be a new one
        try:
            convert_file(source, target, overwrite=True, norm=weights.norm)
        except (UnknownNormError, WeightsFileError) as error:
            if fetched:
                source.unlink()
            fix = (
                f"Fix: try again, or save the file as {source} yourself."
                if fetched
                else "Fix: replace the file."
            )
            reason = str(error).partition("Fix: ")[0].rstrip()
            raise WeightsFileError(
                f"{PREFIX}{weights.name} ({weights.url!r}): {reason} {fix}"
            ) from None
    with atomic_write(recorded) as temporary:
        temporary.write_text(digest)
    return target


def _download(weights: PublishedWeights, path: Path) -> None:
    """Download a file with gdown, which resumes and follows Google Drive's confirmation pages."""
    require_packages(f"{PREFIX}{weights.name}", "gdown")
    import gdown
    from requests import RequestException

    url = weights.url
    logging.getLogger(__name__).info("Downloading %s to %s. %s", url, path, _LICENSE)
    try:
        gdown.download(
            url, str(path), resume=True, use_cookies=False, timeout=(20.0, 60.0), retries=4
        )
    except (gdown.exceptions.DownloadError, RequestException) as error:
        raise FileAccessError(
            f"{PREFIX}{weights.name}: not in the cache, and the download of {url} failed: {first_line(error)}. Fix: "
            f"try again (it resumes {path}*.part); or save the file as {path}; or set {FOLDER_VARIABLE} to a folder "
            f"with {weights.file}, or {MIRROR_VARIABLE} to its base URL."
        ) from None


class WeightsHandler(PathHandler):
    """Resolve ``gw://`` addresses for Detectron2."""

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        self._check_kwargs(kwargs)
        return str(local_weights(path.removeprefix(PREFIX)))

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        return open(self._get_local_path(path), mode, buffering, **kwargs)


def register_weights() -> None:
    """Register ``gw://``, and downloads that stay in the cache, with Detectron2's PathManager."""
    for handler in (WeightsHandler(), CachedURLHandler()):
        PathManager.register_handler(handler, allow_override=True)
