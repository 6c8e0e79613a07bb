"""ImageNet weights: safe reading, conversion, download and verification."""

from .catalog import CATALOG, register_weights
from .conversion import Conversion, convert, convert_file, load_weights
from .network import Architecture, Preprocessing, to_torchvision
from .reading import read_weights_file

__all__ = [
    "CATALOG",
    "Architecture",
    "Conversion",
    "Preprocessing",
    "convert",
    "convert_file",
    "load_weights",
    "read_weights_file",
    "register_weights",
    "to_torchvision",
]
