"""Datasets of a user, in COCO format."""

from .dataset_checks import CheckReport
from .datasets_yaml import read_datasets
from .recipe import auto_config
from .source import CocoDataset, CocoDatasets, register_datasets

__all__ = [
    "CheckReport",
    "CocoDataset",
    "CocoDatasets",
    "auto_config",
    "read_datasets",
    "register_datasets",
]
