"""Backbones and detectors as files that other programs load, each with a proof of its numbers."""

from .backbone import FORMATS, export_backbone
from .detector import export_detector, read_image_for
from .features import Normalisation
from .model import load_model
from .parity import TOLERANCE, ParityError, worst_relative
from .weights_file import LAYOUTS

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "TOLERANCE",
    "Normalisation",
    "ParityError",
    "export_backbone",
    "export_detector",
    "load_model",
    "read_image_for",
    "worst_relative",
]
