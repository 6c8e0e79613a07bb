"""ImageNet weights: safe reading, conversion, download and verification."""

from .architecture import Architecture
from .catalog import CATALOG, PublishedWeights, local_weights, register_weights
from .conversion import Conversion, convert, to_torchvision
from .provenance import Preprocessing, Provenance
from .reading import read_weights_file
from .weights_io import convert_file, load_weights

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
