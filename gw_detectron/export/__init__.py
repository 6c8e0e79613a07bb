"""Export backbones and detectors, and check the exported numbers."""

from ..checkpoint import load_model
from .backbone import FORMATS, export_backbone
from .detection import EvaluationImages
from .detector import DETECTOR_FORMATS, dataset_classes, export_detector, read_image_for
from .feature_extractor import Normalization
from .model_card import card_facts
from .parity import TOLERANCE, worst_relative
from .safetensors_writer import LAYOUTS

__all__ = [
    "DETECTOR_FORMATS",
    "FORMATS",
    "LAYOUTS",
    "TOLERANCE",
    "EvaluationImages",
    "Normalization",
    "card_facts",
    "dataset_classes",
    "export_backbone",
    "export_detector",
    "load_model",
    "read_image_for",
    "worst_relative",
]
