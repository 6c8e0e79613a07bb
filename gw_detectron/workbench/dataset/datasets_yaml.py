"""datasets.yaml: read a user's datasets from it, and write it as the record of a run."""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from ...atomic import atomic_write
from ...config import parse_config
from ...errors import ConfigError, MissingFileError, similar_names
from .source import CocoDataset, CocoDatasets, opened

DATASETS_FILE = "datasets.yaml"  # in a run folder, beside config.yaml
_PATHS = ("json", "images")


def record_datasets(datasets: CocoDatasets, folder: str, run_folder: str = "") -> None:
    """Write ``datasets.yaml`` and the derived annotation files to a folder of a run folder.

    Paths of files in the run folder are relative, so that it can be moved. Without datasets, the ``datasets.yaml`` of
    an earlier run is removed.
    """
    record = Path(folder, DATASETS_FILE)
    roles = {role: named for role, named in vars(datasets).items() if named}
    if not roles:
        record.unlink(missing_ok=True)
        return

    folder = os.path.abspath(folder)
    top = os.path.abspath(run_folder or folder)
    tree: dict[str, Any] = {}
    for role, named in roles.items():
        for name, dataset in named.items():
            if source := opened(name):
                source.write()
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
    path = existing_path(path, "--datasets", os.path.isfile)
    with open(path, encoding="utf-8", errors="replace") as file:
        tree = parse_config(file.read(), path)
    _check_keys(tree, ("train", "val"), path, "")

    datasets = CocoDatasets()
    for role, named in tree.items():
        if not isinstance(named, dict) or not named:
            raise ConfigError(
                f"'{path}', {role}: not a mapping of names. Fix: write NAME: and its json and images below."
            )
        for name, given in named.items():
            getattr(datasets, role)[name] = _read_dataset(given, role, name, path)
    return datasets


def _read_dataset(given: Any, role: str, name: str, path: str) -> CocoDataset:
    key = f"{role}.{name}"
    if not isinstance(given, dict) or not all(
        isinstance(given.get(p), str) for p in _PATHS
    ):
        raise ConfigError(
            f"'{path}', {key}: expected json: FILE and images: FOLDER below it."
        )
    known = [field.name for field in fields(CocoDataset)]
    if role == "val":
        known.remove("val_fraction")
    _check_keys(given, known, path, f"{key}.")
    if "val_fraction" in given:
        check_fraction(given["val_fraction"], f"'{path}', {key}.val_fraction")

    folder = os.path.dirname(path)
    absolute = {}
    for part in _PATHS:
        path = os.path.expanduser(given[part])
        absolute[part] = (
            path if "://" in path else os.path.abspath(os.path.join(folder, path))
        )
    return CocoDataset(**given | absolute)


def _check_keys(
    given: Iterable[str], known: Collection[str], path: str, prefix: str
) -> None:
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
