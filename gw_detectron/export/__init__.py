"""Export backbones and detectors, and check the exported numbers."""

from ..checkpoint import load_model
from .backbone import FeatureExtractor, Normalization, export_backbone
from .detector import export_detector, read_image_for
from .formats import FORMATS

__all__ = [
    "FORMATS",
    "FeatureExtractor",
    "Normalization",
    "export_backbone",
    "export_detector",
    "load_model",
    "read_image_for",
]
