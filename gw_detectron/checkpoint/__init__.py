"""Checkpoints of runs: open, load strictly, record."""

from .loading import GWDetectionCheckpointer, LoadReport, load_checkpoint, load_model, norm_mismatch
from .opening import Checkpoint, StartWeights, best_checkpoint, detector_file, open_checkpoint, open_start_weights
from .records import RUN_RECORD, NormRecord, RunRecord, check_recorded_config, norm_differences, trained_classes

__all__ = [
    "RUN_RECORD",
    "Checkpoint",
    "GWDetectionCheckpointer",
    "LoadReport",
    "NormRecord",
    "RunRecord",
    "StartWeights",
    "best_checkpoint",
    "check_recorded_config",
    "detector_file",
    "load_checkpoint",
    "load_model",
    "norm_differences",
    "norm_mismatch",
    "open_checkpoint",
    "open_start_weights",
    "trained_classes",
]
