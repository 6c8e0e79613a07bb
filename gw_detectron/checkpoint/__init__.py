"""Checkpoints of runs: open, load strictly, record."""

from ..weights.record import NORMS
from .loading import GWDetectionCheckpointer, LoadReport, load_checkpoint, load_model, norm_mismatch
from .opening import Checkpoint, StartWeights, best_checkpoint, last_checkpoint, open_checkpoint, open_start_weights
from .records import RUN_RECORD, NormRecord, RunRecord, norm_differences, trained_classes

__all__ = [
    "NORMS",
    "RUN_RECORD",
    "Checkpoint",
    "GWDetectionCheckpointer",
    "LoadReport",
    "NormRecord",
    "RunRecord",
    "StartWeights",
    "best_checkpoint",
    "last_checkpoint",
    "load_checkpoint",
    "load_model",
    "norm_differences",
    "norm_mismatch",
    "open_checkpoint",
    "open_start_weights",
    "trained_classes",
]
