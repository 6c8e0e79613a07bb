"""Labels as people have them: Pascal VOC, YOLO and masks, read as the content of a COCO file."""

from .data_yaml import YAML
from .opening import LabelSet, is_layout, labels_digest, names_validation, read_labels

__all__ = [
    "YAML",
    "LabelSet",
    "is_layout",
    "labels_digest",
    "names_validation",
    "read_labels",
]
