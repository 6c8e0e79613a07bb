"""datasets.yaml: read a user's datasets from it, and write it as the record of a run."""

import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog
from detectron2.utils.file_io import PathManager

from ...atomic import atomic_write
from ...config import parse_config
from ...errors import ConfigError, MissingFileError, similar_names
from .source import CocoDataset, CocoDatasets, needs_registration

DATASETS_FILE = "datasets.yaml"  # in a run folder, beside config.yaml
_PATHS = ("json", "images")


def record_datasets(datasets: CocoDatasets, folder: str, run_folder: str = "") -> None:
    """Write ``datasets.yaml`` and the derived annotation files to a folder of a run folder.

    Paths of files in the run folder are relative, so that it can be moved. Without datasets, the ``datasets.yaml`` of
    an earlier run is removed.
    """
    record = Path(folder, DATASETS_FILE)
    if not any(vars(datasets).values()):
        record.unlink(missing_ok=True)
        return
    folder, top = os.path.abspath(folder), os.path.abspath(run_folder or folder)
    tree: dict[str, Any] = {}
    for role, named in vars(datasets).items():
        for name, dataset in named.items():
            PathManager.get_local_path(dataset.json)  # writes a derived file
            given = {key: value for key, value in asdict(dataset).items() if value}
            if Path(dataset.json).is_relative_to(top):
                given["json"] = os.path.relpath(dataset.json, folder)
            tree.setdefault(role, {})[name] = given
    with atomic_write(record) as temporary:
        temporary.write_text(yaml.safe_dump(tree, sort_keys=False))


def read_datasets(path: str) -> CocoDatasets:
    """Read datasets from a yaml; relative paths start at its folder.

    ``train`` and ``val`` map names of datasets to the fields of :class:`CocoDataset`. A dataset for evaluation has no
    ``val_fraction``. Their files need not exist.

    Raises:
        MissingFileError: the yaml does not exist.
        ConfigError: the yaml has an unknown key or a value of the wrong type.
    """
    with open(
        existing_path(path, "--datasets", os.path.isfile), encoding="utf-8", errors="replace"
    ) as file:
        tree = parse_config(file.read(), path)
    _check_keys(tree, ("train", "val"), path, "")
    found = CocoDatasets()
    for role, named in tree.items():
        if not isinstance(named, dict) or not named:
            raise ConfigError(
                f"'{path}', {role}: not a mapping of names. Fix: write NAME: and its json and images below."
            )
        known = [
            each.name
            for each in fields(CocoDataset)
            if role == "train" or each.name != "val_fraction"
        ]
        for name, given in named.items():
            key = f"{role}.{name}"
            if not isinstance(given, dict) or not all(
                isinstance(given.get(each), str) for each in _PATHS
            ):
                raise ConfigError(
                    f"'{path}', {key} ({reprlib.repr(given)}): expected json: FILE and images: FOLDER below it."
                )
            _check_keys(given, known, path, f"{key}.")
            if "val_fraction" in given:
                check_fraction(given["val_fraction"], f"'{path}', {key}.val_fraction")
            paths = {
                each: os.path.join(os.path.dirname(path), os.path.expanduser(given[each]))
                for each in _PATHS
            }
            absolute = {each: os.path.abspath(value) for each, value in paths.items()}
            getattr(found, role)[name] = CocoDataset(**given | absolute)
    return found


def classes_of(metadata: Metadata) -> dict[int, str]:
    """Return the class names of a dataset by category id, in the order of a detector's outputs; {} if unknown."""
    names = metadata.get("thing_classes", None) or []
    indices = metadata.get("thing_dataset_id_to_contiguous_id", None) or {
        index: index for index in range(len(names))
    }
    return {
        number: names[index]
        for number, index in sorted(indices.items(), key=lambda pair: pair[1])
    }


def class_metadata(cfg: CfgNode, trained: Mapping[int, str] | None = None) -> Metadata:
    """Return ``thing_classes`` and ``thing_dataset_id_to_contiguous_id`` of a config's model; empty if unknown.

    ``trained`` has the classes that the model's checkpoint records, by category id; they decide.
    """
    for name in (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN):
        classes = {} if needs_registration([name]) else classes_of(MetadataCatalog.get(name))
        if classes and (not trained or classes == trained):
            return MetadataCatalog.get(name)
    if not trained:
        return Metadata()
    ids = {number: index for index, number in enumerate(trained)}
    return Metadata(thing_classes=list(trained.values()), thing_dataset_id_to_contiguous_id=ids)


def _check_keys(given: Iterable[str], known: Collection[str], path: str, prefix: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(
                f"'{path}': unknown key '{prefix}{key}'.{similar_names(key, known)} Fix: use {', '.join(known)}."
            )


def check_fraction(value: Any, name: str) -> None:
    """Raise ConfigError unless a value is a number between 0 and 1."""
    if type(value) is not float or not 0 < value < 1:
        raise ConfigError(
            f"{name} ({value!r}): not between 0 and 1. Fix: give e.g. 0.1 for a tenth of the images."
        )


def existing_path(path: str, name: str, exists: Callable[[str], bool]) -> str:
    """Return the absolute path of a local file or folder that ``exists``, by os.path; ``name`` is its flag."""
    found = os.path.abspath(os.path.expanduser(path))
    if not exists(found):
        kind = "file" if exists is os.path.isfile else "folder"
        raise MissingFileError(
            f"{name} ('{path}'): no {kind} '{found}'. Fix: give an existing {kind}."
        )
    return found
