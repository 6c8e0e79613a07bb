"""Export backbones and detectors, and check the exported numbers."""

from .backbone import FeatureExtractor, export_backbone
from .detector import export_detector, read_image_for
from .formats import FORMATS

__all__ = [
    "FORMATS",
    "FeatureExtractor",
    "export_backbone",
    "export_detector",
    "read_image_for",
]
