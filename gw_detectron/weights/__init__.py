"""Weights and checkpoints: read safely, open, convert, download, load strictly, record."""

from .catalog import CATALOG, register_weights
from .conversion import Conversion, convert, convert_file, load_weights
from .loading import (
    GWDetectionCheckpointer,
    LoadReport,
    load_checkpoint,
    load_model,
    norm_mismatch,
)
from .network import Architecture, Preprocessing, to_torchvision
from .opening import (
    Checkpoint,
    StartWeights,
    best_checkpoint,
    detector_file,
    open_checkpoint,
    open_start_weights,
)
from .reading import read_weights_file
from .records import (
    RUN_RECORD,
    NormRecord,
    RunRecord,
    check_recorded_config,
    norm_differences,
    trained_classes,
)

__all__ = [
    "CATALOG",
    "RUN_RECORD",
    "Architecture",
    "Checkpoint",
    "Conversion",
    "GWDetectionCheckpointer",
    "LoadReport",
    "NormRecord",
    "Preprocessing",
    "RunRecord",
    "StartWeights",
    "best_checkpoint",
    "check_recorded_config",
    "convert",
    "convert_file",
    "detector_file",
    "load_checkpoint",
    "load_model",
    "load_weights",
    "norm_differences",
    "norm_mismatch",
    "open_checkpoint",
    "open_start_weights",
    "read_weights_file",
    "register_weights",
    "to_torchvision",
    "trained_classes",
]
