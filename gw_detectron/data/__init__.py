"""Datasets: synthetic ones that come with the package, and a user's own in COCO format."""

from .coco_datasets import (
    CocoDataset,
    CocoDatasets,
    needs_registration,
    read_classes,
    register_datasets,
    registered_datasets,
)
from .datasets_yaml import (
    DATASETS_FILE,
    check_fraction,
    existing_path,
    read_datasets,
    record_datasets,
    recorded_classes,
)
from .derived_json import read_json
from .synthetic import HardSyntheticConfig, SyntheticConfig, make_synthetic, register_synthetic

__all__ = [
    "DATASETS_FILE",
    "CocoDataset",
    "CocoDatasets",
    "HardSyntheticConfig",
    "SyntheticConfig",
    "check_fraction",
    "existing_path",
    "make_synthetic",
    "needs_registration",
    "read_classes",
    "read_datasets",
    "read_json",
    "record_datasets",
    "recorded_classes",
    "register_datasets",
    "register_synthetic",
    "registered_datasets",
]
