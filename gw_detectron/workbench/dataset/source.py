"""Register a user's datasets in COCO format."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.utils.file_io import PathManager

from ...errors import ConfigError, DataError
from .coco_files import DerivedFile, complete_coco, read_json, split_coco


@dataclass(frozen=True)
class CocoDataset:
    """A dataset in COCO format."""

    json: str  # the annotation file
    images: str  # the folder to which file_name in it is relative
    val_fraction: float = (
        0.0  # share of the images that become a dataset of their own, for validation
    )
    keypoint_names: list[str] = field(
        default_factory=list
    )  # default: from the file's categories
    # pairs that a horizontal flip exchanges; default: names that differ only in left and right
    keypoint_flip_map: list[list[str]] = field(default_factory=list)
    made_by: str = ""  # command that writes the files; the message on a missing file names it


@dataclass(frozen=True)
class CocoDatasets:
    """The datasets of a run by name, for training and evaluation."""

    train: dict[str, CocoDataset] = field(default_factory=dict)
    val: dict[str, CocoDataset] = field(default_factory=dict)


_registered: dict[str, CocoDataset] = {}


def registered_datasets(train: Iterable[str], val: Iterable[str]) -> CocoDatasets:
    """Return the named datasets that :func:`register_datasets` has registered."""
    return CocoDatasets(
        *(
            {name: _registered[name] for name in names if name in _registered}
            for names in (train, val)
        )
    )


def needs_registration(names: Iterable[str]) -> bool:
    """Return whether a dataset is unknown, or known by :func:`register_datasets` only."""
    return any(name not in DatasetCatalog or name in _registered for name in names)


def register_datasets(datasets: CocoDatasets, folder: str) -> CocoDatasets:
    """Register datasets with Detectron2 for a run folder; a second call replaces datasets of its names.

    One with ``val_fraction`` becomes two: NAME, and for validation NAME with ``_val`` in place of ``_train``. Their
    files, and those that need completion (:func:`complete_coco`), are derived ones in ``folder``/datasets.

    Returns:
        The datasets that were registered, without ``val_fraction``.

    Raises:
        ConfigError: a name belongs to another dataset, or a file would replace its source.
        DataError: a file cannot be split.
    """
    found = CocoDatasets()
    for role, name, dataset, metadata in _resolve(datasets, folder):
        known = {**found.train, **found.val}
        if name in known and ("part" in metadata or known[name] != dataset):
            raise ConfigError(
                f"dataset ('{name}'): names two datasets of this run. Fix: rename one of them."
            )
        _register(name, dataset, metadata)
        getattr(found, role)[name] = dataset
    return found


def _resolve(
    datasets: CocoDatasets, folder: str
) -> Iterator[tuple[str, str, CocoDataset, dict[str, Any]]]:
    """Yield role, name, dataset and metadata: of a derived file its source, and which part it is."""
    classes: dict[int, str] = {}  # of the first file that can be read, from the training on
    for role, named in vars(datasets).items():
        for name, dataset in named.items():
            content: Any = None
            ignored = (
                () if dataset.val_fraction else (OSError, DataError)
            )  # which preflight reports
            with contextlib.suppress(*ignored):
                content = read_json(dataset.json)
            with contextlib.suppress(LookupError, TypeError):
                classes = classes or {
                    each["id"]: each["name"] for each in content["categories"]
                }
            source = {"source": dataset.json, "made_by": dataset.made_by}
            source |= _keypoint_metadata(dataset, content)
            completed = complete_coco(content, classes)
            if dataset.val_fraction:
                names = {"train": name, "val": f"{name.removesuffix('_train')}_val"}
                for (part, each), half in zip(
                    names.items(), split_coco(completed, dataset.val_fraction), strict=True
                ):
                    yield (
                        part,
                        each,
                        _derived(each, dataset, folder, half),
                        {**source, "part": part},
                    )
            elif completed is content:
                yield role, name, dataset, source
            else:
                yield role, name, _derived(name, dataset, folder, completed), source


def _keypoint_metadata(dataset: CocoDataset, content: Any) -> dict[str, Any]:
    """Return names and flips of the keypoints as given, else by the names in the categories of the file."""
    names = dataset.keypoint_names
    with contextlib.suppress(LookupError, TypeError, AttributeError):
        found = [each["keypoints"] for each in content["categories"] if each.get("keypoints")]
        names = names or found[0] * all(each == found[0] for each in found)
    sides = [("left", "right"), ("Left", "Right"), ("LEFT", "RIGHT")]
    swaps = [
        (each, each.replace(a, b))
        for each in names
        for a, b in sides
        if each.replace(a, b) in {*names} - {each}
    ]
    flips: list[tuple[str, ...]] = [tuple(pair) for pair in dataset.keypoint_flip_map]
    flips += [] if flips else swaps
    return {"keypoint_names": names, "keypoint_flip_map": flips} if names else {}


def _derived(name: str, dataset: CocoDataset, folder: str, content: Any) -> CocoDataset:
    """Replace the file of a dataset by one in the run folder that is derived from it."""
    path = os.path.join(os.path.abspath(folder), "datasets", f"{name}.json")
    if os.path.realpath(path) == os.path.realpath(dataset.json):
        raise ConfigError(
            f"dataset ('{name}'): the run would replace its file '{path}'. Fix: give another OUTPUT_DIR."
        )
    PathManager.register_handler(DerivedFile(path, dataset.json, content), allow_override=True)
    return replace(dataset, json=path, val_fraction=0.0)


def _register(name: str, dataset: CocoDataset, metadata: dict[str, Any]) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"dataset ('{name}'): not a name. Fix: use letters, digits, '_', '-' and '.' only."
        )
    if name in DatasetCatalog and name not in _registered:
        raise ConfigError(
            f"dataset ('{name}'): belongs to another dataset already. Fix: choose another name."
        )
    # Metadata cannot be changed: remove an earlier registration first.
    DatasetCatalog.pop(name, None)
    MetadataCatalog.pop(name, None)
    register_coco_instances(name, metadata, dataset.json, dataset.images)
    _registered[name] = dataset
