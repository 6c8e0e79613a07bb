"""Datasets: a user's own in COCO format, and a synthetic one that comes with the package."""

from .dataset_checks import CheckReport
from .datasets_yaml import read_datasets
from .recipe import auto_config
from .source import CocoDataset, CocoDatasets, register_datasets
from .synthetic import SyntheticConfig, make_synthetic, register_synthetic, synthetic_images

__all__ = [
    "CheckReport",
    "CocoDataset",
    "CocoDatasets",
    "SyntheticConfig",
    "auto_config",
    "make_synthetic",
    "read_datasets",
    "register_datasets",
    "register_synthetic",
    "synthetic_images",
]

register_synthetic()
