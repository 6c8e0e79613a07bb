"""ImageNet weights: safe reading, conversion, download, strict loading and verification."""

from .architecture import Architecture
from .catalog import CATALOG, PublishedWeights, local_weights, register_weights
from .checkpoint_file import Checkpoint, StartWeights, last_checkpoint, open_checkpoint, open_start_weights
from .checkpointer import GWDetectionCheckpointer
from .load_report import LoadReport
from .loading import load_checkpoint, norm_mismatch
from .norm_record import NormRecord, norm_differences
from .provenance import Preprocessing, Provenance
from .reading import read_weights_file
from .trained_model import load_model
from .weight_notes import NORMS
from .weights_conversion import Conversion, convert, to_torchvision
from .weights_io import convert_file, load_weights

__all__ = [
    "CATALOG",
    "NORMS",
    "Architecture",
    "Checkpoint",
    "Conversion",
    "GWDetectionCheckpointer",
    "LoadReport",
    "NormRecord",
    "Preprocessing",
    "Provenance",
    "PublishedWeights",
    "StartWeights",
    "convert",
    "convert_file",
    "last_checkpoint",
    "load_checkpoint",
    "load_model",
    "load_weights",
    "local_weights",
    "norm_differences",
    "norm_mismatch",
    "open_checkpoint",
    "open_start_weights",
    "read_weights_file",
    "register_weights",
    "to_torchvision",
]
