"""Datasets as a user describes them, and their yaml: read it, and write it as the record of a run."""

import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ...atomic import write_text
from ...config import parse_config
from ...errors import ConfigError, check_fraction, existing_path, similar_names
from .layouts import is_layout

DATASETS_FILE = "datasets.yaml"  # in a run folder, beside config.yaml
_PATHS = ("json", "images")


@dataclass(frozen=True)
class CocoDataset:
    """A dataset as a user names it."""

    json: str  # the annotation file in COCO format, or a folder or file of other labels
    # the folder to which file_name is relative; "": of the labels
    images: str = ""
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


def write_datasets(datasets: CocoDatasets, folder: str, run_folder: str = "") -> None:
    """Write ``datasets.yaml`` to a folder of a run folder.

    Paths of files in the run folder are relative, so that it can be moved. Without datasets, the ``datasets.yaml`` of
    an earlier run is removed.
    """
    record = Path(folder, DATASETS_FILE)
    folder = os.path.abspath(folder)
    top = os.path.abspath(run_folder or folder)
    tree: dict[str, Any] = {}
    for role, named in vars(datasets).items():
        for name, dataset in named.items():
            given = {key: value for key, value in asdict(dataset).items() if value}
            if Path(dataset.json).is_relative_to(top):
                given["json"] = os.path.relpath(dataset.json, folder)
            tree.setdefault(role, {})[name] = given

    if tree:
        write_text(record, yaml.safe_dump(tree, sort_keys=False))
    else:
        record.unlink(missing_ok=True)


def read_datasets(path: str) -> CocoDatasets:
    """Read datasets from a yaml; relative paths start at its folder.

    ``train`` and ``val`` map names of datasets to the fields of :class:`CocoDataset`. A dataset for evaluation has no
    ``val_fraction``. Their files need not exist.

    Raises:
        MissingFileError: the yaml does not exist.
        ConfigError: the yaml has an unknown key or a value of the wrong type.
    """
    path = existing_path("--datasets", path, os.path.isfile)
    with open(path, encoding="utf-8", errors="replace") as file:
        tree = parse_config(file.read(), path)
    if "names" in tree:
        raise ConfigError(
            f"--datasets ('{path}'): a data.yaml of YOLO. Fix: give it to --train-json."
        )
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
    is_mapping = isinstance(given, dict)
    if not is_mapping or not all(isinstance(given.get(p, ""), str) for p in _PATHS):
        raise ConfigError(
            f"'{path}', {key}: expected json: FILE and images: FOLDER below it."
        )
    known = [each.name for each in fields(CocoDataset)]
    if role == "val":
        known.remove("val_fraction")
    _check_keys(given, known, path, f"{key}.")
    if "val_fraction" in given:
        check_fraction(f"'{path}', {key}.val_fraction", given["val_fraction"])

    folder = os.path.dirname(path)
    paths = {part: absolute_path(given.get(part, ""), folder) for part in _PATHS}
    dataset = CocoDataset(**{**given, **paths})
    check_pair(dataset, f"'{path}', {key}.")
    return dataset


def absolute_path(path: str, folder: str = "") -> str:
    """Return the absolute path of a local file or folder, which may be relative to ``folder``; "" of none."""
    if not path or "://" in path:
        return path
    return os.path.abspath(os.path.join(folder, os.path.expanduser(path)))


def check_pair(dataset: CocoDataset, place: str) -> None:
    """Raise ConfigError unless a dataset has labels and, of a COCO json, the folder of the photos."""
    if not dataset.json:
        raise ConfigError(
            f"{place}json: not given. Fix: give the labels: a COCO json, or a folder."
        )
    if not (dataset.images or is_layout(dataset.json)):
        file = os.path.basename(dataset.json)
        raise ConfigError(
            f"{place}images: not given. Fix: give the folder of the photos of the COCO json '{file}'; labels of Pascal "
            "VOC or YOLO, and masks, are given as a folder instead."
        )


def _check_keys(
    given: Iterable[str], known: Collection[str], path: str, prefix: str
) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(
                f"'{path}': unknown key '{prefix}{key}'.{similar_names(key, known)} Fix: use {', '.join(known)}."
            )
