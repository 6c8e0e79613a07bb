"""Names and category ids of the classes that a config's model predicts."""

import contextlib
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from ..errors import DataError
from .coco_datasets import needs_registration
from .coco_split import read_json
from .datasets_yaml import RECORD, read_datasets


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
    record = Path(config_file).with_name(RECORD) if config_file else None
    if record is not None and record.is_file():
        recorded = read_datasets(str(record), must_exist=False)
        for dataset in (*recorded.val.values(), *recorded.train.values()):
            # an unusable file is skipped, as the names are not needed to predict
            with contextlib.suppress(OSError, DataError, LookupError, TypeError):
                return _from_categories(read_json(dataset.json)["categories"])
    return Metadata()


def _from_categories(categories: list[dict]) -> Metadata:
    """Number the classes by category id, as Detectron2 does."""
    names = {each["id"]: each["name"] for each in sorted(categories, key=lambda each: each["id"])}
    return Metadata(
        thing_classes=list(names.values()),
        thing_dataset_id_to_contiguous_id={number: index for index, number in enumerate(names)},
    )
