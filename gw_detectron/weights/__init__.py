"""ImageNet weights: safe reading, conversion, download and verification."""

from .architecture import Architecture, to_torchvision
from .catalog import CATALOG, PublishedWeights, local_weights, register_weights
from .conversion import Conversion, convert, convert_file, load_weights
from .reading import read_weights_file
from .record import Preprocessing, Provenance

__all__ = [
    "CATALOG",
    "Architecture",
    "Conversion",
    "Preprocessing",
    "Provenance",
    "PublishedWeights",
    "convert",
    "convert_file",
    "load_weights",
    "local_weights",
    "read_weights_file",
    "register_weights",
    "to_torchvision",
]
