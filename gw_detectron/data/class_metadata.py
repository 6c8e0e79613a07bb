"""Names and category ids of the classes that a config's model predicts."""

from detectron2.config import CfgNode
from detectron2.data import Metadata, MetadataCatalog

from .coco_datasets import needs_registration
from .datasets_yaml import recorded_classes


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
    classes = recorded_classes(config_file) if config_file else {}
    if not classes:
        return Metadata()
    return Metadata(
        thing_classes=list(classes.values()),
        thing_dataset_id_to_contiguous_id={number: index for index, number in enumerate(classes)},
    )
