"""ImageNet weights: safe reading, conversion, download, strict loading and verification."""

from .architecture import Architecture, WeightsError
from .catalog import CATALOG, PublishedWeights, local_weights, register_weights
from .convert import Conversion, convert, to_torchvision
from .load_report import LoadReport, PartialLoadError, strict_backbone_load
from .norms import NORMS, NormMismatchError, NoteOfNorms, differing_norms
from .provenance import Preprocessing, Provenance
from .reading import RefusedFileError, WeightsFileError, read_weights_file
from .weights_io import convert_file, load_weights

__all__ = [
    "CATALOG",
    "NORMS",
    "Architecture",
    "Conversion",
    "LoadReport",
    "NormMismatchError",
    "NoteOfNorms",
    "PartialLoadError",
    "Preprocessing",
    "Provenance",
    "PublishedWeights",
    "RefusedFileError",
    "WeightsError",
    "WeightsFileError",
    "convert",
    "convert_file",
    "differing_norms",
    "load_weights",
    "local_weights",
    "read_weights_file",
    "register_weights",
    "strict_backbone_load",
    "to_torchvision",
]
