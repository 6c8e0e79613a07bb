"""The authors' ImageNet weights as ``gw://imagenet/<name>``, files as ``gw://file/<path>`` and ``gw://hf/<repo>``.

``MODEL.WEIGHTS`` takes all three. Remote files are downloaded once, all kinds are converted once, into the folder
``gw_detectron`` of Detectron2's cache (``$FVCORE_CACHE``, else ``~/.torch/iopath_cache``). Environment variables:

- ``GW_DETECTRON_WEIGHTS``: a folder with the authors' files; they are not downloaded then.
- ``GW_DETECTRON_MIRROR``: a base URL of the authors' files, instead of Google Drive.
- ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``: of the Hugging Face hub, see :mod:`.hub`.
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
from ..errors import (
    ConfigError,
    FileAccessError,
    MissingFileError,
    UnknownNormError,
    UserError,
    WeightsError,
    WeightsFileError,
)
from .download import download
from .hub import fetch_from_hub
from .provenance import sha256_of, tool
from .weights_io import convert_file

PREFIX = "gw://"
FOLDER_VARIABLE = "GW_DETECTRON_WEIGHTS"
MIRROR_VARIABLE = "GW_DETECTRON_MIRROR"
_FILE, _HUB = "file/", "hf/"
_GN64 = "GN:groups=64"


@dataclass(frozen=True)
class PublishedWeights:
    """Weights that the authors published.

    The authors give no hash: that of the first download is recorded in the cache, and later downloads must match it.

    Args:
        architecture: such as ``R-50``.
        drive_id: of the file on Google Drive.
        top1: accuracy on the ImageNet validation set in percent, from the paper; None if no source has it.
        positions: of the norm.
        norm: the norm at these positions. The released layer of GW adds no eps.
        label: of the norm, in file names and in the names of weights other than GW's.
        license: of the weights.

    Source: Group Whitening (CVPR 2021), Table 3; the files, README of the authors' repository. XBNBlock (CVPR 2022):
        readme and ``experiments/ResNet50_XBNBlock_P2.sh`` of https://github.com/huangleiBuaa/XBNBlock.
    """

    architecture: str
    drive_id: str
    top1: float | None
    positions: str = "S1-B2"
    norm: str = "GW:groups=64,iters=5,eps=0"
    label: str = "GW"
    license: str = "not stated by the authors (their code is BSD-2-Clause), so this package does not redistribute them"

    @property
    def name(self) -> str:
        return f"imagenet/{self.architecture}" + (f"-{self.label}" if self.label != "GW" else "")

    @property
    def file(self) -> str:
        """File name in the cache, in a local folder, on a mirror."""
        return f"{self.architecture}-{self.label}-{self.positions}.pth"

    @property
    def url(self) -> str:
        """The file's download address."""
        mirror = os.environ.get(MIRROR_VARIABLE)
        return f"{mirror.rstrip('/')}/{self.file}" if mirror else f"https://drive.google.com/uc?id={self.drive_id}"


CATALOG: Mapping[str, PublishedWeights] = {
    weights.name: weights
    for weights in (
        PublishedWeights("R-50", "1bNeTDhfu5jg8aBatOCSQAe_WzTouUfHA", 77.72),
        PublishedWeights("R-101", "1BnuzZzpaQ6rgBHho5mOQhBWBh1Lh-trK", 78.71),
        PublishedWeights("X-50-32x4d", "1pJSIbjeHpELJ5zlWOF6ekRGjykRYf6tO", 78.43),
        PublishedWeights("X-101-32x8d", "1lVAvTSCnHs-Ij5gt7ubQvLmZzUQdKUNt", 80.43),
        # GN in place of GW: XBNBlock, trained as GW was ("standard") and with the authors' "advanced" recipe
        PublishedWeights("R-50", "1xqGsCDD4Y_rv6PjTtACAs8D918fjUT55", None, norm=_GN64, label="GN64"),
        PublishedWeights("R-50", "1pHRhjc67M5wki5fWy44SG5lj06q71gat", None, norm=_GN64, label="GN64-advanced"),
    )
}


def local_weights(name: str) -> Path:
    """Return the path of converted weights; download and convert them if needed.

    Args:
        name: ``imagenet/<name>``, see :data:`CATALOG`; ``file/<path>``; or ``hf/<repo>``, see :func:`.fetch_from_hub`.

    Raises:
        WeightsError: unknown name.
        UnknownNormError: the file does not prove a norm.
        WeightsFileError: the file is damaged, or its hash is not the recorded one.
        OSError: the file is not on this machine and cannot be downloaded, or cannot be read.
    """
    cache = Path(get_cache_dir()) / "gw_detectron"
    if name.startswith(_FILE):
        source = Path(name.removeprefix(_FILE))
        if not source.is_file():
            raise MissingFileError(
                f"weights ({PREFIX + name!r}): file not found (cwd: {os.getcwd()!r}). Fix: give an existing path."
            )
        return _converted_file(source, cache)
    if name.startswith(_HUB):
        return _converted_file(fetch_from_hub(PREFIX + name, cache / "hub"), cache)
    if name not in CATALOG:
        known = ", ".join(PREFIX + known_name for known_name in CATALOG)
        raise WeightsError(
            f"weights ({PREFIX + name!r}): unknown name. Fix: give {known}, {PREFIX}file/<path> or "
            f"{PREFIX}hf/<owner>/<repo>."
        )
    weights = CATALOG[name]
    with file_lock(str(cache / weights.file)):
        return _published_weights(weights, cache)


def _converted_file(source: Path, cache: Path) -> Path:
    digest = sha256_of(source)
    target = cache / "files" / f"{digest[:20]}.pkl"
    with file_lock(str(target)):
        if not _is_current(target):
            _convert(source, target, origin=str(source), digest=digest)
    return target


def _published_weights(weights: PublishedWeights, cache: Path) -> Path:
    target = (cache / weights.file).with_suffix(".pkl")
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder and _is_current(target):
        return target
    source = Path(folder or cache) / weights.file
    origin, fetched = str(source), False
    if folder and not source.is_file():
        raise MissingFileError(
            f"{FOLDER_VARIABLE} ({folder!r}): {weights.file} not found, needed for {PREFIX}{weights.name}. Fix: save "
            f"{weights.url} there under that name, or unset {FOLDER_VARIABLE}."
        )
    if not source.is_file():
        origin, fetched = weights.url, True
        _download(weights, source)
    digest = sha256_of(source)
    recorded = _read_record(target).get("source_sha256")
    if recorded not in (None, digest):
        raise WeightsFileError(
            f"{str(source)!r}: SHA-256 is {digest}. Fix: give the file of {PREFIX}{weights.name} with SHA-256 "
            f"{recorded}, recorded at first use; or, to trust the new file, remove {_record(target)}."
        )
    if not _is_current(target):
        try:
            expected = {name: getattr(weights, name) for name in ("architecture", "positions", "norm")}
            _convert(source, target, origin, digest, **expected)
        except (UnknownNormError, WeightsFileError) as error:
            if fetched:
                source.unlink()
            fix = f"Fix: try again, or save the file as {source} yourself." if fetched else "Fix: replace the file."
            reason = str(error).partition("Fix: ")[0].rstrip()
            raise WeightsFileError(f"{PREFIX}{weights.name} ({origin!r}): {reason} {fix}") from None
    return target


def _convert(source: Path, target: Path, origin: str, digest: str, **expected: Any) -> None:
    convert_file(source, target, overwrite=True, sha256=digest, **expected)
    record = {
        "source": origin,
        "source_sha256": digest,
        "converted_sha256": sha256_of(target),
        "tool": tool(),
    }
    with atomic_write(_record(target)) as temporary:
        temporary.write_text(json.dumps(record, indent=1))


def _is_current(target: Path) -> bool:
    """Check that converted weights are undamaged and of this version."""
    record = _read_record(target)
    return record.get("tool") == tool() and target.is_file() and sha256_of(target) == record.get("converted_sha256")


def _record(target: Path) -> Path:
    return target.with_suffix(".json")


def _read_record(target: Path) -> dict[str, str]:
    path = _record(target)
    try:
        return dict(json.loads(path.read_text())) if path.is_file() else {}
    except (TypeError, ValueError) as error:
        raise WeightsFileError(
            f"{str(path)!r}: damaged record of the first file's hash ({error}). Fix: remove it to trust the next file."
        ) from None


def _download(weights: PublishedWeights, path: Path) -> None:
    logging.getLogger(__name__).info(f"Downloading {weights.url} to {path}. License of the weights: {weights.license}.")
    try:
        download(weights.url, path)
    except FileAccessError as error:
        raise FileAccessError(
            f"{PREFIX}{weights.name}: not in the cache, and {str(error).rstrip('.')}; or save {weights.url} as "
            f"{path}; or set {FOLDER_VARIABLE} to a folder with {weights.file}, or {MIRROR_VARIABLE} to its base URL."
        ) from None


def local_path(address: str, key: str) -> str:
    """Resolve an address to a file on this machine; fetch the file if needed.

    Arguments and errors are those of :func:`gw_detectron.checkpoint.open_checkpoint`.
    """
    try:
        path = PathManager.get_local_path(address)
    except UserError:
        raise
    except OSError as error:
        raise FileAccessError(
            f"{key}: cannot fetch '{address}': {error}. Fix: give the path of a file on this machine."
        ) from error
    except (ValueError, KeyError, RuntimeError) as error:  # RuntimeError: Detectron2's catalog does not have it
        raise ConfigError(
            f"{key}: unknown address '{address}': {error}. Fix: give the path of a file or a known address."
        ) from error
    if not os.path.exists(path):
        if "://" in address:
            raise ConfigError(
                f"{key}: unknown scheme '{address.partition('://')[0]}://' of '{address}'. Fix: give the path of a "
                'file, or "" to train from random values with MODEL.BACKBONE.FREEZE_AT 0.'
            )
        fix = "give an existing path or gw://imagenet/R-50."
        if address.startswith("weights/"):  # in the configs
            fix = "put your own weights there (none are published under weights/), see MODEL_ZOO.md."
        raise MissingFileError(f"{key}: file not found: '{address}' (cwd: {os.getcwd()}). Fix: {fix}")
    return path


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
    """Register ``gw://`` with Detectron2's PathManager."""
    PathManager.register_handler(WeightsHandler(), allow_override=True)
