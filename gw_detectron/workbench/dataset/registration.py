"""Open the datasets of a run, each COCO file once, and register them with Detectron2.

:func:`register_datasets` opens files where the flags are read. The recipe, the checks, the training and the evaluation
find the open source by the name of the dataset, as they find its records in Detectron2's ``DatasetCatalog``.
"""

import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from ...errors import ConfigError, DataError
from .coco_content import (
    category_names,
    complete_coco,
    number_alike,
    read_json,
    split_coco,
)
from .datasets_yaml import (
    CocoDataset,
    CocoDatasets,
    absolute_path,
    write_datasets,
)
from .layouts import LabelSet, is_layout, read_labels
from .metadata import coco_metadata
from .source import CocoSource, is_foreign, own_source, own_sources

_LONGEST_NAME = 200  # bytes; names of files may have 255, and add an ending


def register_datasets(datasets: CocoDatasets, folder: str) -> CocoDatasets:
    """Open datasets and register them with Detectron2 for a run folder.

    One with ``val_fraction`` becomes two: NAME, and for validation NAME with ``_val`` in place of ``_train``. Their
    files, and those that need completion (:func:`complete_coco`), are derived ones in ``folder``/datasets, which
    :func:`record_datasets` writes. A second call replaces datasets of its names. A file that cannot be read is
    registered, too: the checks report why.

    Returns:
        The datasets that were registered, without ``val_fraction``.

    Raises:
        ConfigError: a name belongs to another dataset, or a file would replace its source.
        DataError: a file cannot be split.
    """
    registered = CocoDatasets()
    for role, name, source in _open_all(datasets, folder):
        known = {**registered.train, **registered.val}
        # the parts of a data.yaml differ; a json may have both roles
        is_same = not source.part and known.get(name) == source.dataset
        if name in known and not is_same:
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
    read = functools.cache(_try_read)  # a file may have several names
    # of the first file that can be read, from the training on
    classes: dict[int, str] = {}

    for role, named in vars(datasets).items():
        for name, given in named.items():
            # which a record elsewhere can name
            path = absolute_path(given.json)
            # a data.yaml has parts; a json that has both roles is read once
            part = role if is_layout(path) else ""
            read_set, error = read(path, absolute_path(given.images), part)
            labels = _complete(read_set, classes)
            classes = classes or category_names(labels.content)

            dataset = replace(given, json=labels.path, images=labels.images)
            if dataset.val_fraction:
                if error is not None:
                    raise error
                yield from _split(name, dataset, labels, folder)
            elif labels is read_set:
                yield role, name, CocoSource(dataset, labels, error=error)
            else:
                yield role, name, _derive(name, dataset, labels, folder)


def _complete(labels: LabelSet, classes: Mapping[int, str]) -> LabelSet:
    """Return labels with the classes of the run and with all fields; the same object if a json has them."""
    content = labels.content
    if labels.layout:
        content = number_alike(content, classes)
    content, notes = complete_coco(content, classes)
    if content is labels.content and not labels.layout:
        return labels
    return labels._replace(content=content, notes=[*labels.notes, *notes])


def _split(
    name: str, dataset: CocoDataset, labels: LabelSet, folder: str
) -> Iterator[tuple[str, str, CocoSource]]:
    """Yield role, name and source of the two parts of a dataset."""
    halves = split_coco(labels.content, dataset.val_fraction)
    names = {"train": name, "val": f"{name.removesuffix('_train')}_val"}
    for (part, own), content in zip(names.items(), halves, strict=True):
        half = labels._replace(content=content)
        yield part, own, _derive(own, dataset, half, folder, part)


def _try_read(path: str, images: str, part: str) -> tuple[LabelSet, Exception | None]:
    """Return the labels of a file or folder, or the error of reading them, which the checks report."""
    try:
        return read_labels(path, images, part), None
    except (OSError, ConfigError, DataError) as error:
        return LabelSet(None, path, images), error


def _derive(
    name: str, dataset: CocoDataset, labels: LabelSet, folder: str, part: str = ""
) -> CocoSource:
    """Return the source of a file in the run folder that is derived from a dataset's."""
    path = os.path.join(os.path.abspath(folder), "datasets", f"{name}.json")
    if os.path.realpath(path) == os.path.realpath(dataset.json):
        raise ConfigError(
            f"dataset ('{name}'): the run would replace its file '{path}'. Fix: give another OUTPUT_DIR."
        )
    own = replace(dataset, json=path, val_fraction=0.0)
    return CocoSource(own, labels, part=part)


def _register(name: str, source: CocoSource) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"dataset ('{name}'): not a name. Fix: use letters, digits, '_', '-' and '.' only."
        )
    if len(name.encode()) > _LONGEST_NAME:
        raise ConfigError(
            f"dataset ('{name}'): longer than {_LONGEST_NAME} bytes, too long for names of files. Fix: give a shorter "
            "name."
        )
    if is_foreign(name):
        raise ConfigError(
            f"dataset ('{name}'): belongs to another dataset already. Fix: choose another name."
        )

    # Metadata cannot be changed: remove an earlier registration first.
    DatasetCatalog.pop(name, None)
    MetadataCatalog.pop(name, None)
    DatasetCatalog.register(name, source.records)
    MetadataCatalog.get(name).set(**coco_metadata(source))


def open_dataset(name: str) -> CocoSource | None:
    """Return the open source of a dataset, else open its json; None without one.

    A dataset that is a Python function has no json, and so has an unknown name.
    """
    if not is_foreign(name):
        return own_source(name)
    metadata = MetadataCatalog.get(name)
    path = metadata.get("json_file")
    if not path:
        return None
    dataset = CocoDataset(path, metadata.get("image_root") or ".")
    labels = LabelSet(read_json(path), path, dataset.images)
    return CocoSource(dataset, labels, is_filled_in=False)


def record_datasets(cfg: CfgNode, folder: str, run_folder: str = "") -> None:
    """Write the derived files of a config's own datasets, and their ``datasets.yaml`` to ``folder``.

    This is when a run begins. See :func:`.datasets_yaml.write_datasets`.
    """
    datasets = CocoDatasets()
    roles = {"train": cfg.DATASETS.TRAIN, "val": cfg.DATASETS.TEST}
    for role, names in roles.items():
        for name, source in own_sources(names).items():
            source.write()
            getattr(datasets, role)[name] = source.dataset
    write_datasets(datasets, folder, run_folder)
