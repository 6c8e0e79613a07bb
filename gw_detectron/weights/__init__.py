"""Weights and checkpoints, from a file to a trained model.

The files of this room, in the order of their story:

- ``reading``: read a weight file without running its code.
- ``network_record``: what a file records about its network.
- ``inferring``: infer a ResNet and its norms from tensors.
- ``converting``: rename ImageNet weights from torchvision to Detectron2, and check each tensor.
- ``fetching``: turn an address into a file, also ``gw://``, which is downloaded and converted.
- ``opening``: open a checkpoint: a file, an address, or the last one of a run folder.
- ``comparing``: compare the norms of a checkpoint with a model's.
- ``recording``: record norms and the run in the checkpoints of a training.
- ``loading``: load a checkpoint strictly, and report what was loaded.
- ``describing``: print what a file records.

Three records are in files. :class:`NetworkRecord` is what a weight file records about its network.
:class:`NormRecorder` and :class:`RunRecord` write during a training: the norms, which a
NetworkRecord then has, and how the run was made.
"""

from .comparing import norm_differences
from .converting import Conversion, convert, convert_file, load_weights
from .fetching import CATALOG, register_weights
from .inferring import Architecture, to_torchvision
from .load_report import LoadReport
from .loading import (
    GWDetectionCheckpointer,
    load_checkpoint,
    load_model,
    norm_mismatch,
    open_detector,
)
from .network_record import NetworkRecord, Preprocessing
from .opening import (
    Checkpoint,
    LazyCheckpoint,
    best_checkpoint,
    detector_file,
    open_checkpoint,
    open_start_weights,
)
from .reading import read_weights_file
from .recording import (
    RUN_RECORD_KEY,
    NormRecorder,
    RunRecord,
    trained_classes,
    trained_scale,
)

__all__ = [
    "CATALOG",
    "RUN_RECORD_KEY",
    "Architecture",
    "Checkpoint",
    "Conversion",
    "GWDetectionCheckpointer",
    "LazyCheckpoint",
    "LoadReport",
    "NetworkRecord",
    "NormRecorder",
    "Preprocessing",
    "RunRecord",
    "best_checkpoint",
    "convert",
    "convert_file",
    "detector_file",
    "load_checkpoint",
    "load_model",
    "load_weights",
    "norm_differences",
    "norm_mismatch",
    "open_checkpoint",
    "open_detector",
    "open_start_weights",
    "read_weights_file",
    "register_weights",
    "to_torchvision",
    "trained_classes",
    "trained_scale",
]
