"""An open COCO file: its content, fingerprint and records, and the file that a run derives from it."""

import hashlib
import json
import logging
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from ...atomic import write_text
from ...errors import DataError
from ...weights.reading import sha256_of
from .coco_content import content_to_records, read_json
from .datasets_yaml import CocoDataset
from .fingerprint import Fingerprint, read_fingerprint
from .layouts import LabelSet

log = logging.getLogger(__name__)


class CocoSource:
    """An open dataset.

    A derived one, a part of a split or a completed copy, stays in memory until the run begins and calls :meth:`write`.

    Args:
        dataset: the dataset; its ``json`` is the user's file, or the file in the run folder that is derived from it.
        labels: the content of the user's file or folder, complete if the dataset has a derived file.
        error: why it could not be read; its content is then None.
        part: ``train`` or ``val`` of a split file, else "".
        is_filled_in: :func:`.coco_content.complete_coco` has seen the content.
    """

    def __init__(
        self,
        dataset: CocoDataset,
        labels: LabelSet,
        *,
        error: Exception | None = None,
        part: str = "",
        is_filled_in: bool = True,
    ) -> None:
        self.dataset = dataset
        self.labels = labels
        self.notes = list(labels.notes)
        self.error = error
        self.part = part
        self.is_filled_in = is_filled_in
        self._is_written = dataset.json == labels.path
        self._is_recorded = False

    @property
    def content(self) -> Any:
        """The content of the file, which is read again if it has been released."""
        if self.error is not None:
            raise self.error
        if self.labels.content is None:
            self.labels = self.labels._replace(content=read_json(self.dataset.json))
        return self.labels.content

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Statistics of images and objects; another format is a DataError."""
        content = self.content
        try:
            return read_fingerprint(content)
        except DataError as error:
            raise DataError(f"'{self.labels.path}': {error}") from error

    def records(self) -> list[dict[str, Any]]:
        """Return the dataset in Detectron2's format."""
        records = content_to_records(self.content, self.dataset.images)
        self._is_recorded = True
        self._release()
        return records

    def write(self) -> None:
        """Write the file if it is a derived one and not written yet."""
        if self._is_written:
            return
        path = Path(self.dataset.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self._text())
        summary = self.labels.summary()
        colon = ": " if summary else ""
        log.info("'%s': written from '%s'%s", path, self.labels.path, colon + summary)
        self._is_written = True
        self._release()

    def sha256(self) -> str:
        """Return the digest of the file, also before it is written."""
        if self._is_written:
            return sha256_of(self.dataset.json)
        return hashlib.sha256(self._text().encode()).hexdigest()

    def _text(self) -> str:
        return json.dumps(self.labels.content)

    def _release(self) -> None:
        """Free the memory of a content that is in the file and in the records."""
        if self._is_written and self._is_recorded:
            self.labels = self.labels._replace(content=None)


def sources_of(cfg: CfgNode) -> dict[str, CocoSource]:
    """Return the sources of a config's own datasets, of training and evaluation."""
    return own_sources((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))


def own_source(name: str) -> CocoSource | None:
    """Return the source of a dataset that this package has registered, None for any other name."""
    source = getattr(DatasetCatalog.data.get(name), "__self__", None)
    return source if isinstance(source, CocoSource) else None


def own_sources(names: Iterable[str]) -> dict[str, CocoSource]:
    """Return the sources of the datasets that this package has registered, by name."""
    return {name: source for name in names if (source := own_source(name))}


def is_foreign(name: str) -> bool:
    """Return whether a dataset is registered, but not by this package."""
    return name in DatasetCatalog and own_source(name) is None
