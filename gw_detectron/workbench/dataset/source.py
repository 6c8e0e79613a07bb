"""An open COCO file: its content, fingerprint and records, and the file that a run derives from it."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog

from ...atomic import atomic_write
from ...errors import DataError, summarize_names
from ...weights.reading import sha256_of
from .coco_content import category_names, content_to_records, read_json
from .datasets_yaml import CocoDataset
from .fingerprint import Fingerprint, read_fingerprint

log = logging.getLogger(__name__)


class CocoSource:
    """An open dataset.

    A derived one, a part of a split or a completed copy, stays in memory until the run begins and calls :meth:`write`.

    Args:
        dataset: the dataset; its ``json`` is the user's file, or the file in the run folder that is derived from it.
        content: the parsed file, complete if the file is derived; None if it could not be read because of ``error``.
        derived_from: the user's file or folder, if ``dataset`` has another file.
        layout: how the labels in it are laid out, "" for a COCO json.
        notes: what the completion replaced, a sentence each.
        part: ``train`` or ``val`` of a split file, else "".
        is_filled_in: :func:`.coco_content.complete_coco` has seen the content.
    """

    def __init__(
        self,
        dataset: CocoDataset,
        content: Any,
        *,
        derived_from: str = "",
        layout: str = "",
        notes: Sequence[str] = (),
        error: Exception | None = None,
        part: str = "",
        is_filled_in: bool = True,
    ) -> None:
        self.dataset = dataset
        self.origin = derived_from or dataset.json
        self.layout = layout
        self.notes = list(notes)
        self.error = error
        self.part = part
        self.is_filled_in = is_filled_in
        self._content = content
        self._is_written = not derived_from
        self._is_recorded = False

    @property
    def content(self) -> Any:
        """The content of the file, which is read again if it has been released."""
        if self.error is not None:
            raise self.error
        if self._content is None:
            self._content = read_json(self.dataset.json)
        return self._content

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Statistics of images and objects; another format is a DataError."""
        content = self.content
        try:
            return read_fingerprint(content)
        except DataError as error:
            raise DataError(f"'{self.origin}': {error}") from error

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
        with atomic_write(path) as temporary:
            temporary.write_bytes(self._text())
        log.info("'%s': written from '%s'%s", path, self.origin, self._summary())
        self._is_written = True
        self._release()

    def sha256(self) -> str:
        """Return the digest of the file, also before it is written."""
        if self._is_written:
            return sha256_of(self.dataset.json)
        return hashlib.sha256(self._text()).hexdigest()

    def _summary(self) -> str:
        """Say what was read of labels that are not a COCO json."""
        if not self.layout:
            return ""
        names = category_names(self._content)
        photos, objects = (len(self._content[key]) for key in ("images", "annotations"))
        return (
            f": {self.layout}, {photos:,} photos, {objects:,} objects, "
            f"classes: {summarize_names(map(str, names.values()))}"
        )

    def _text(self) -> bytes:
        return json.dumps(self._content).encode()

    def _release(self) -> None:
        """Free the memory of a content that is in the file and in the records."""
        if self._is_written and self._is_recorded:
            self._content = None


def own_source(name: str) -> CocoSource | None:
    """Return the source of a dataset that this package has registered, None for any other name."""
    source = getattr(DatasetCatalog.data.get(name), "__self__", None)
    return source if isinstance(source, CocoSource) else None


def own_sources(names: Iterable[str]) -> dict[str, CocoSource]:
    """Return the sources of the datasets that this package has registered, by name."""
    sources = {name: own_source(name) for name in names}
    return {name: source for name, source in sources.items() if source is not None}


def is_foreign(name: str) -> bool:
    """Return whether a dataset is registered, but not by this package."""
    return name in DatasetCatalog and own_source(name) is None
