"""Datasets that come with the package."""

from .registration import register_synthetic
from .synthetic import make_synthetic
from .synthetic_config import HardSyntheticConfig, SyntheticConfig

__all__ = ["HardSyntheticConfig", "SyntheticConfig", "make_synthetic", "register_synthetic"]
