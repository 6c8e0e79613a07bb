"""Export backbones and detectors, and check the exported numbers."""

from .backbone import FeatureExtractor, Normalization, export_backbone
from .detector import export_detector, read_image_for
from .formats import FORMATS

__all__ = [
    "FORMATS",
    "FeatureExtractor",
    "Normalization",
    "export_backbone",
    "export_detector",
    "read_image_for",
]
