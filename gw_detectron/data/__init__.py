"""Datasets: a user's own in COCO format, and a synthetic one that comes with the package."""

from .coco_datasets import CocoDataset, CocoDatasets, needs_registration, register_datasets, registered_datasets
from .coco_files import read_json, split_coco
from .datasets_yaml import (
    DATASETS_FILE,
    check_fraction,
    class_metadata,
    classes_of,
    existing_path,
    read_datasets,
    record_datasets,
)
from .synthetic import SyntheticConfig, make_synthetic, register_synthetic, synthetic_images

__all__ = [
    "DATASETS_FILE",
    "CocoDataset",
    "CocoDatasets",
    "SyntheticConfig",
    "check_fraction",
    "class_metadata",
    "classes_of",
    "existing_path",
    "make_synthetic",
    "needs_registration",
    "read_datasets",
    "read_json",
    "record_datasets",
    "register_datasets",
    "register_synthetic",
    "registered_datasets",
    "split_coco",
    "synthetic_images",
]
