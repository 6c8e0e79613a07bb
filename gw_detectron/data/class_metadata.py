"""Names and category ids of the classes that a config's model predicts."""

from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from .coco_datasets import CocoDatasets, needs_registration, read_classes
from .datasets_yaml import DATASETS_FILE, read_datasets


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
    record = Path(config_file).with_name(DATASETS_FILE)
    return classes_of(read_datasets(str(record), needed=())) if record.is_file() else None


def classes_of(datasets: CocoDatasets) -> Metadata | None:
    """Return the classes of an evaluation, else of its training, numbered by category id as Detectron2 does.

    None if no file lists them.
    """
    if not (classes := read_classes((*datasets.val.values(), *datasets.train.values()))):
        return None
    return Metadata(
        thing_classes=list(classes.values()),
        thing_dataset_id_to_contiguous_id={number: index for index, number in enumerate(classes)},
    )
