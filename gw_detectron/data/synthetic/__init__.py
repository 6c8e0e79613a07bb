"""Synthetic datasets: their scenes, images, annotations and registration."""

from .generation import draw_scene, make_synthetic
from .registration import register_synthetic
from .synthetic_config import HardSyntheticConfig, SyntheticConfig

__all__ = ["HardSyntheticConfig", "SyntheticConfig", "draw_scene", "make_synthetic", "register_synthetic"]
