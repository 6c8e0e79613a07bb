"""The authors' ImageNet weights under ``gw://imagenet/<architecture>``, and any file under ``gw://file/<path>``.

``MODEL.WEIGHTS`` takes both. The first is downloaded once, both are converted once, into the folder ``gw_detectron`` of
Detectron2's cache (``$FVCORE_CACHE``, else ``~/.torch/iopath_cache``). Two environment variables change where a file
comes from:

- ``GW_DETECTRON_WEIGHTS``: a folder that has the authors' files; nothing is downloaded then.
- ``GW_DETECTRON_MIRROR``: an address below which the authors' files lie, instead of Google Drive.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from detectron2.utils.file_io import PathHandler, PathManager
from iopath.common.file_io import file_lock, get_cache_dir

from ..atomic import atomic_write
from .download import DownloadFailedError, download
from .files import convert_file
from .provenance import TORCHVISION, Preprocessing, sha256_of, tool
from .reading import WeightsFileError

PREFIX = "gw://"
FOLDER_VARIABLE = "GW_DETECTRON_WEIGHTS"
MIRROR_VARIABLE = "GW_DETECTRON_MIRROR"
_FILE = "file/"


@dataclass(frozen=True)
class PublishedWeights:
    """A file of the authors.

    Args:
        architecture: such as ``R-50``.
        drive_id: of the file on Google Drive.
        top1: accuracy on the ImageNet validation set in percent, by the paper.
        positions: where whitening stands.
        preprocessing: how images have to be given.
        licence: under which terms the weights are.
        sha256: of the file; None, because the authors give none: then the first file seen is recorded in the cache,
            and every later one has to be equal.

    Source: Group Whitening (CVPR 2021), Table 3; the files, README of the authors' repository.
    """

    architecture: str
    drive_id: str
    top1: float
    positions: str = "S1-B2"
    preprocessing: Preprocessing = TORCHVISION
    licence: str = "not stated by the authors (their code is BSD-2-Clause), so the files are not passed on here"
    sha256: str | None = None

    @property
    def name(self) -> str:
        return f"imagenet/{self.architecture}"

    @property
    def file(self) -> str:
        """The name of the authors' file in the cache, in a local folder and on a mirror."""
        return f"{self.architecture}-GW-{self.positions}.pth"

    @property
    def url(self) -> str:
        """Where the file is fetched from."""
        mirror = os.environ.get(MIRROR_VARIABLE)
        return f"{mirror.rstrip('/')}/{self.file}" if mirror else f"https://drive.google.com/uc?id={self.drive_id}"


CATALOG: Mapping[str, PublishedWeights] = {
    record.name: record
    for record in (
        PublishedWeights("R-50", "1bNeTDhfu5jg8aBatOCSQAe_WzTouUfHA", 77.72),
        PublishedWeights("R-101", "1BnuzZzpaQ6rgBHho5mOQhBWBh1Lh-trK", 78.71),
        PublishedWeights("X-50-32x4d", "1pJSIbjeHpELJ5zlWOF6ekRGjykRYf6tO", 78.43),
        PublishedWeights("X-101-32x8d", "1lVAvTSCnHs-Ij5gt7ubQvLmZzUQdKUNt", 80.43),
    )
}


def local_weights(name: str) -> Path:
    """Gives converted weights as a file on this machine, fetching and converting them if need be.

    Args:
        name: ``imagenet/<architecture>``, see :data:`CATALOG`, or ``file/<path>``.

    Raises:
        ValueError: there are no weights of this name, or the file is damaged or not the one seen before.
        OSError: the file is nowhere on this machine and cannot be fetched, or cannot be read.
    """
    folder = Path(get_cache_dir()) / "gw_detectron"
    if name.startswith(_FILE):
        return _convert_local_file(Path(name.removeprefix(_FILE)), folder)
    if name not in CATALOG:
        raise ValueError(
            f"{PREFIX}{name}: there are {', '.join(PREFIX + known for known in CATALOG)}, and {PREFIX}file/<path>"
        )
    record = CATALOG[name]
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(str(folder / record.file)):
        return _published(record, folder)


def local_path(address: str) -> str:
    """Gives what an address stands for as a path on this machine: ``gw://`` and all others that Detectron2 reads.

    Raises:
        ValueError: see :func:`local_weights`.
        OSError: see :func:`local_weights`.
    """
    return PathManager.get_local_path(address)


def _convert_local_file(path: Path, folder: Path) -> Path:
    target = folder / "files" / f"{sha256_of(path)[:20]}-{tool().split()[-1]}.pkl"
    target.parent.mkdir(parents=True, exist_ok=True)
    note = target.with_suffix(".json")
    with file_lock(str(target)):
        if not target.is_file() or _read_note(note).get("converted_sha256") != sha256_of(target):
            convert_file(path, target, overwrite=True)
            _write_note(note, {"source": str(path), "converted_sha256": sha256_of(target)})
    return target


def _published(record: PublishedWeights, folder: Path) -> Path:
    target = (folder / record.file).with_suffix(".pkl")
    note = target.with_suffix(".json")
    seen = _read_note(note)
    ready = seen.get("tool") == tool() and target.is_file() and sha256_of(target) == seen.get("converted_sha256")
    given = os.environ.get(FOLDER_VARIABLE)
    if ready and not given:
        return target
    source = Path(given) / record.file if given else folder / record.file
    origin, fetched = str(source), False
    if given and not source.is_file():
        raise FileNotFoundError(
            f"{PREFIX}{record.name}: {FOLDER_VARIABLE} is {given}, but there is no {record.file} in it. Save "
            f"{record.url} there under that name, or unset {FOLDER_VARIABLE}"
        )
    if not source.is_file():
        origin, fetched = record.url, True
        _fetch(record, source)
    found = sha256_of(source)
    expected = record.sha256 or seen.get("source_sha256")
    if expected not in (None, found):
        recorded, trust = "", ""
        if not record.sha256:
            recorded = f", as {note} recorded at its first use"
            trust = f"; if you trust it more, remove {note}"
        raise WeightsFileError(
            f"{source} has the SHA-256 {found}, but {PREFIX}{record.name} has {expected}{recorded}. Replace it{trust}"
        )
    if ready:
        return target
    try:
        convert_file(source, target, architecture=record.architecture, positions=record.positions, overwrite=True)
    except WeightsFileError as error:
        if fetched:
            source.unlink()
        advice = "Try again, or save the file there yourself" if fetched else "Replace it"
        raise WeightsFileError(f"{PREFIX}{record.name}, from {origin}: {error}. {advice}") from None
    content = {
        "source": origin,
        "source_sha256": found,
        "converted_sha256": sha256_of(target),
        "tool": tool(),
    }
    _write_note(note, content)
    return target


def _fetch(record: PublishedWeights, path: Path) -> None:
    log = logging.getLogger(__name__)
    log.info(f"Fetching {record.url} to {path}; the licence of these weights is {record.licence}.")
    try:
        download(record.url, path)
    except DownloadFailedError as error:
        raise DownloadFailedError(
            f"{PREFIX}{record.name}: {path} does not exist, and {error}. Fetch {record.url} in another way and save it "
            f"as {path}; or set {FOLDER_VARIABLE} to a folder that has {record.file}, or {MIRROR_VARIABLE} to the "
            "address of one"
        ) from None


def _write_note(path: Path, content: Mapping[str, str]) -> None:
    with atomic_write(path) as beside:
        beside.write_text(json.dumps(content, indent=1))


def _read_note(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise WeightsFileError(
            f"{path}, which records the weights seen first, is damaged ({error}). Remove it to trust the next file"
        ) from None


class WeightsHandler(PathHandler):
    """Lets Detectron2 read ``gw://`` addresses."""

    def _get_supported_prefixes(self) -> list[str]:
        return [PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        self._check_kwargs(kwargs)
        return str(local_weights(path.removeprefix(PREFIX)))

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        return open(self._get_local_path(path), mode, buffering, **kwargs)


def register_weights() -> None:
    """Makes ``gw://`` known to Detectron2; a second call changes nothing."""
    PathManager.register_handler(WeightsHandler(), allow_override=True)
