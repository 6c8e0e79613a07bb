"""ImageNet weights: safe reading, conversion, download and verification."""

from .architecture import Architecture, to_torchvision
from .catalog import CATALOG, register_weights
from .conversion import Conversion, convert, convert_file, load_weights
from .reading import read_weights_file
from .record import Preprocessing

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
