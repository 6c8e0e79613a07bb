"""Detectors as functions of tensors: what lies between a detector's modules, for rows of fixed number."""

from .accuracy import EvaluationImages, compare_accuracy
from .batches import pad_batch
from .matching import check_detections
from .one_image import OneImageProgram
from .outputs import postprocess, to_instances
from .program import DetectorProgram
from .rcnn import RCNNProgram
from .retinanet import RetinaNetProgram
from .supported import check_supported

__all__ = [
    "DetectorProgram",
    "EvaluationImages",
    "OneImageProgram",
    "RCNNProgram",
    "RetinaNetProgram",
    "check_detections",
    "check_supported",
    "compare_accuracy",
    "pad_batch",
    "postprocess",
    "to_instances",
]
