"""Datasets of a user, in COCO format."""

from .datasets_yaml import CocoDataset, CocoDatasets, read_datasets
from .recipe import auto_config
from .registration import register_datasets

__all__ = [
    "CocoDataset",
    "CocoDatasets",
    "auto_config",
    "read_datasets",
    "register_datasets",
]
