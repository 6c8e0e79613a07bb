"""Datasets that come with the package."""

from .synthetic import SyntheticConfig, make_synthetic, register_synthetic

__all__ = ["SyntheticConfig", "make_synthetic", "register_synthetic"]
