"""Datasets that come with the package."""

from .registration import register_synthetic
from .synthetic import SyntheticConfig, make_synthetic

__all__ = ["SyntheticConfig", "make_synthetic", "register_synthetic"]
