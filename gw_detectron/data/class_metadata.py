"""Names and category ids of the classes that a config's model predicts."""

from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from .coco_datasets import needs_registration
from .datasets_yaml import DATASETS_FILE, read_recorded_classes


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
    """Return the classes of the run of a config file, which the ``datasets.yaml`` beside it has.

    They are numbered by category id, as Detectron2 does.

    Returns:
        Their metadata; None without such a file, or if it has none.

    Raises:
        ConfigError: the ``datasets.yaml`` has an unknown key or a value of the wrong type.
    """
    record = Path(config_file).with_name(DATASETS_FILE)
    if not record.is_file() or not (classes := read_recorded_classes(str(record))):
        return None
    return Metadata(
        thing_classes=list(classes.values()),
        thing_dataset_id_to_contiguous_id={number: index for index, number in enumerate(classes)},
    )
