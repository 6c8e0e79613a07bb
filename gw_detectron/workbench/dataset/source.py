"""The datasets of a run: each COCO file is opened once per start, and handed on by its name.

:func:`register_datasets` opens files where the flags are read. The recipe, the checks, the training and the evaluation
find the open :class:`CocoSource` by :func:`opened`, as they find its records in Detectron2's ``DatasetCatalog``.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog

from ...atomic import atomic_write
from ...errors import ConfigError, DataError
from ...weights.reading import sha256_of
from .coco_content import (
    MALFORMED,
    category_names,
    complete_coco,
    content_to_records,
    read_json,
    records_to_content,
    split_coco,
)
from .fingerprint import Fingerprint, read_fingerprint

log = logging.getLogger(__name__)

_SIDES = (("left", "right"), ("Left", "Right"), ("LEFT", "RIGHT"))


@dataclass(frozen=True)
class CocoDataset:
    """A dataset in COCO format, as a user names it."""

    json: str  # the annotation file
    images: str  # the folder to which file_name in it is relative
    # share of the images that become a dataset of their own, for validation
    val_fraction: float = 0.0
    # default: from the file's categories
    keypoint_names: list[str] = field(default_factory=list)
    # pairs that a horizontal flip exchanges; default: names that differ only in left and right
    keypoint_flip_map: list[list[str]] = field(default_factory=list)
    # command that writes the files; the message on a missing file names it
    made_by: str = ""


@dataclass(frozen=True)
class CocoDatasets:
    """The datasets of a run by name, for training and evaluation."""

    train: dict[str, CocoDataset] = field(default_factory=dict)
    val: dict[str, CocoDataset] = field(default_factory=dict)


class CocoSource:
    """An open dataset: its file, content, images and fingerprint.

    Args:
        dataset: the dataset without ``val_fraction``. Its ``json`` is the user's file, or a derived one that
            :meth:`write` makes.
        content: the parsed file, with the fields of :func:`complete_coco` if ``is_filled_in``; None if it could not
            be read because of ``error``.
        origin: the file that the user named.
        notes: what the completion replaced, a sentence each.
        part: ``train`` or ``val`` of a split file, else "".
    """

    def __init__(
        self,
        dataset: CocoDataset,
        content: Any,
        *,
        origin: str = "",
        notes: Sequence[str] = (),
        error: Exception | None = None,
        part: str = "",
        is_filled_in: bool = True,
    ) -> None:
        self.dataset = dataset
        self.origin = origin or dataset.json
        self.notes = list(notes)
        self.error = error
        self.part = part
        self.is_filled_in = is_filled_in
        self.waits = (
            False  # a run is being built: its derived files are written when it begins
        )
        self._content = content
        self._is_written = dataset.json in ("", self.origin)

    @property
    def content(self) -> Any:
        """The content of the file, which is read again after :meth:`records` has released it."""
        if self.error is not None:
            raise self.error
        if self._content is None:
            self._content = read_json(self.dataset.json)
        return self._content

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Statistics of images and objects; another format is a DataError."""
        return read_fingerprint(self.content)

    def records(self) -> list[dict[str, Any]]:
        """Return the dataset in Detectron2's format, and release what can be read again."""
        if not self.waits:
            self.write()
        records = content_to_records(self.content, self.dataset.images)
        if self._is_written:
            self._content = None
        return records

    def write(self) -> None:
        """Write the file if it is a derived one and not written yet."""
        if self._is_written or self.error is not None:
            return
        path = Path(self.dataset.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(self._text())
        self._is_written = True
        log.info("'%s': written from '%s'", path, self.origin)

    def begin(self) -> None:
        """Write the file when the run begins, which has the records, and release the content."""
        self.waits = False
        self.write()
        self._content = None

    def sha256(self) -> str:
        """Return the digest of the file, also before it is written."""
        if self._is_written:
            return sha256_of(self.dataset.json)
        return hashlib.sha256(self._text()).hexdigest()

    def _text(self) -> bytes:
        return json.dumps(self._content).encode()


def open_coco(dataset: CocoDataset) -> CocoSource:
    """Open a dataset that is not registered; raise the error of reading it."""
    content, notes = complete_coco(read_json(dataset.json))
    return CocoSource(dataset, content, notes=notes)


_opened: dict[str, CocoSource] = {}


def opened(name: str) -> CocoSource | None:
    """Return the open source of a dataset that :func:`register_datasets` has registered."""
    source = _opened.get(name)
    is_current = source is not None and DatasetCatalog.data.get(name) == source.records
    return source if is_current else None


def open_registered(name: str, *, evaluated: bool = False) -> CocoSource | None:
    """Return the source of any registered dataset; None if its records have no boxes.

    Datasets that Detectron2 or the user's program has registered are read from their json, or from their records, which
    have the fields that an evaluation needs if they are ``evaluated``.
    """
    source = opened(name)
    if source is not None:
        return source
    metadata = MetadataCatalog.get(name)
    root = metadata.get("image_root") or "."
    if path := metadata.get("json_file"):
        return CocoSource(CocoDataset(path, root), read_json(path), is_filled_in=False)

    classes = metadata.get("thing_classes")
    content = records_to_content(DatasetCatalog.get(name), classes, evaluated=evaluated)
    if content is None:
        return None
    # the names of images in records are paths
    return CocoSource(CocoDataset("", "."), content, origin="a Python function")


def registered_datasets(train: Iterable[str], val: Iterable[str]) -> CocoDatasets:
    """Return the named datasets that :func:`register_datasets` has registered."""

    def known(names: Iterable[str]) -> dict[str, CocoDataset]:
        sources = {name: opened(name) for name in names}
        return {name: source.dataset for name, source in sources.items() if source}

    return CocoDatasets(known(train), known(val))


def needs_registration(names: Iterable[str]) -> bool:
    """Return whether a dataset is unknown, or known by :func:`register_datasets` only."""
    return any(name not in DatasetCatalog or opened(name) for name in names)


def register_datasets(datasets: CocoDatasets, folder: str) -> CocoDatasets:
    """Open datasets and register them with Detectron2 for a run folder.

    One with ``val_fraction`` becomes two: NAME, and for validation NAME with ``_val`` in place of ``_train``. Their
    files, and those that need completion (:func:`complete_coco`), are derived ones in ``folder``/datasets. A second
    call replaces datasets of its names. A file that cannot be read is registered, too: the checks report why.

    Returns:
        The datasets that were registered, without ``val_fraction``.

    Raises:
        ConfigError: a name belongs to another dataset, or a file would replace its source.
        DataError: a file cannot be split.
    """
    registered = CocoDatasets()
    for role, name, source in _open_all(datasets, folder):
        known = {**registered.train, **registered.val}
        if name in known and (source.part or known[name] != source.dataset):
            raise ConfigError(
                f"dataset ('{name}'): names two datasets of this run. Fix: rename one of them."
            )
        _register(name, source)
        getattr(registered, role)[name] = source.dataset
    return registered


def _open_all(
    datasets: CocoDatasets, folder: str
) -> Iterator[tuple[str, str, CocoSource]]:
    """Yield role, name and source of each dataset; a split one has both roles."""
    files: dict[str, tuple[Any, Exception | None]] = {}
    classes: dict[
        int, str
    ] = {}  # of the first file that can be read, from the training on
    for role, named in vars(datasets).items():
        for name, given in named.items():
            dataset = replace(
                given, json=_absolute(given.json), images=_absolute(given.images)
            )
            if dataset.json not in files:
                files[dataset.json] = _try_read(dataset)
            content, error = files[dataset.json]
            classes = classes or category_names(content)
            completed, notes = complete_coco(content, classes)
            dataset = _with_keypoints(dataset, content)

            if dataset.val_fraction:
                halves = split_coco(completed, dataset.val_fraction)
                names = {"train": name, "val": f"{name.removesuffix('_train')}_val"}
                for (part, part_name), half in zip(names.items(), halves, strict=True):
                    yield (
                        part,
                        part_name,
                        _derived(part_name, dataset, half, folder, notes, part),
                    )
            elif completed is content:
                yield role, name, CocoSource(dataset, content, error=error)
            else:
                yield role, name, _derived(name, dataset, completed, folder, notes)


def _absolute(path: str) -> str:
    """Return the absolute path of a local file or folder, which a record elsewhere can name."""
    return path if "://" in path else os.path.abspath(path)


def _try_read(dataset: CocoDataset) -> tuple[Any, Exception | None]:
    """Return the content of a file, or the error of reading it, which the checks report."""
    try:
        return read_json(dataset.json), None
    except (OSError, DataError) as error:
        if dataset.val_fraction:  # nothing to split
            raise
        return None, error


def _with_keypoints(dataset: CocoDataset, content: Any) -> CocoDataset:
    """Return a dataset with the names of its keypoints: as given, else by the categories of the file."""
    names = dataset.keypoint_names or _category_keypoints(content)
    flips = dataset.keypoint_flip_map
    if not flips:
        mirrored = [
            (name, name.replace(left, right))
            for name in names
            for left, right in _SIDES
        ]
        flips = [
            [name, other]
            for name, other in mirrored
            if other != name and other in names
        ]
    return replace(dataset, keypoint_names=names, keypoint_flip_map=flips)


def _category_keypoints(content: Any) -> list[str]:
    """Return the names of keypoints in the categories of a file; [] unless all agree."""
    try:
        lists = [c["keypoints"] for c in content["categories"] if c.get("keypoints")]
    except MALFORMED:
        return []
    first = lists[0] if lists else []
    is_names = isinstance(first, list) and all(isinstance(name, str) for name in first)
    return first if is_names and all(names == first for names in lists) else []


def _derived(
    name: str,
    dataset: CocoDataset,
    content: Any,
    folder: str,
    notes: Sequence[str],
    part: str = "",
) -> CocoSource:
    """Return the source of a file in the run folder that is derived from a dataset's."""
    path = os.path.join(os.path.abspath(folder), "datasets", f"{name}.json")
    if os.path.realpath(path) == os.path.realpath(dataset.json):
        raise ConfigError(
            f"dataset ('{name}'): the run would replace its file '{path}'. Fix: give another OUTPUT_DIR."
        )
    own = replace(dataset, json=path, val_fraction=0.0)
    return CocoSource(own, content, origin=dataset.json, notes=notes, part=part)


def _register(name: str, source: CocoSource) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"dataset ('{name}'): not a name. Fix: use letters, digits, '_', '-' and '.' only."
        )
    if name in DatasetCatalog and opened(name) is None:
        raise ConfigError(
            f"dataset ('{name}'): belongs to another dataset already. Fix: choose another name."
        )

    # Metadata cannot be changed: remove an earlier registration first.
    DatasetCatalog.pop(name, None)
    MetadataCatalog.pop(name, None)
    DatasetCatalog.register(name, source.records)
    MetadataCatalog.get(name).set(**_metadata(source))
    _opened[name] = source


def _metadata(source: CocoSource) -> dict[str, Any]:
    """Return the metadata of a dataset as Detectron2 names them."""
    dataset = source.dataset
    metadata: dict[str, Any] = {
        "json_file": dataset.json,
        "image_root": dataset.images,
        "evaluator_type": "coco",
        "source": source.origin,
        "made_by": dataset.made_by,
    }
    if dataset.keypoint_names:
        metadata["keypoint_names"] = dataset.keypoint_names
        metadata["keypoint_flip_map"] = [
            tuple(pair) for pair in dataset.keypoint_flip_map
        ]

    if source.error is None:
        names = category_names(source.content)
        metadata |= _class_fields(
            {number: names[number] for number in _sorted_ids(names)}
        )
    return metadata


def _sorted_ids(names: Mapping[int, str]) -> list[int]:
    try:
        return sorted(names)
    except TypeError:  # ids of several types, which the checks refuse
        return []


def _class_fields(classes: Mapping[int, str]) -> dict[str, Any]:
    """Return Detectron2's metadata of classes, by category id in the order of a detector's outputs."""
    if not classes:
        return {}
    return {
        "thing_classes": list(classes.values()),
        "thing_dataset_id_to_contiguous_id": {
            number: index for index, number in enumerate(classes)
        },
    }


def classes_of(metadata: Metadata) -> dict[int, str]:
    """Return the class names of a dataset by category id, in the order of a detector's outputs."""
    names = metadata.get("thing_classes") or []
    indices = metadata.get("thing_dataset_id_to_contiguous_id")
    if not indices:
        return dict(enumerate(names))
    in_order = sorted(indices, key=indices.__getitem__)
    return {number: names[indices[number]] for number in in_order}


def class_metadata(cfg: CfgNode, trained: Mapping[int, str] | None = None) -> Metadata:
    """Return ``thing_classes`` and ``thing_dataset_id_to_contiguous_id`` of a config's model; empty if unknown.

    ``trained`` has the classes that the model's checkpoint records, by category id; they decide.
    """
    for name in (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN):
        if needs_registration([name]):
            continue
        metadata = MetadataCatalog.get(name)
        classes = classes_of(metadata)
        if classes and (not trained or classes == trained):
            return metadata
    return Metadata(**_class_fields(trained or {}))
