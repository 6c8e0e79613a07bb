"""Datasets: a user's own in COCO format, and a synthetic one that comes with the package."""

from .coco_datasets import CocoDataset, CocoDatasets, register_datasets
from .datasets_yaml import read_datasets
from .synthetic import SyntheticConfig, make_synthetic, register_synthetic, synthetic_images

__all__ = [
    "CocoDataset",
    "CocoDatasets",
    "SyntheticConfig",
    "make_synthetic",
    "read_datasets",
    "register_datasets",
    "register_synthetic",
    "synthetic_images",
]
