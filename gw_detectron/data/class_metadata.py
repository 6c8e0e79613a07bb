"""Names and category ids of the classes that a config's model predicts."""

import contextlib
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from ..errors import DataError
from .coco_datasets import CocoDatasets, needs_registration
from .datasets_yaml import RECORD, read_datasets
from .derived_json import read_json


def class_metadata(cfg: CfgNode, config_file: str | None = None) -> Metadata:
    """Return names and category ids of the classes.

    They are those of the config's test dataset or, without one, of its training dataset. Names that are not registered
    are looked up in the ``datasets.yaml`` beside the config file, whose images need not exist.

    Args:
        cfg: the config.
        config_file: the file that the config was read from.

    Returns:
        Metadata with ``thing_classes`` and often ``thing_dataset_id_to_contiguous_id``; empty if they are unknown.

    Raises:
        ConfigError: the ``datasets.yaml`` has an unknown key or a value of the wrong type.
    """
    for name in (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN):
        if not needs_registration([name]) and MetadataCatalog.get(name).get("thing_classes", None):
            return MetadataCatalog.get(name)
    return (recorded_classes(config_file) if config_file else None) or Metadata()


def recorded_classes(config_file: str) -> Metadata | None:
    """Return the classes of the ``datasets.yaml`` beside a config file; None without a usable one.

    Raises:
        ConfigError: the ``datasets.yaml`` has an unknown key or a value of the wrong type.
    """
    record = Path(config_file).with_name(RECORD)
    return classes_of(read_datasets(str(record), needed=())) if record.is_file() else None


def classes_of(datasets: CocoDatasets) -> Metadata | None:
    """Return the classes of the first file that lists them; None if no file does."""
    for dataset in (*datasets.val.values(), *datasets.train.values()):
        # an unusable file is skipped: the checks before a run name its fault, and a prediction does not need it
        with contextlib.suppress(OSError, DataError, LookupError, TypeError):
            return _from_categories(read_json(dataset.json)["categories"])
    return None


def _from_categories(categories: list[dict]) -> Metadata:
    """Number the classes by category id, as Detectron2 does."""
    names = {each["id"]: each["name"] for each in sorted(categories, key=lambda each: each["id"])}
    return Metadata(
        thing_classes=list(names.values()),
        thing_dataset_id_to_contiguous_id={number: index for index, number in enumerate(names)},
    )
