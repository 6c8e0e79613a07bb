"""Detectors as functions of tensors: what lies between a detector's modules, for rows of fixed number."""

from .accuracy import EvaluationImages, compare_accuracy
from .calling import detect, postprocess
from .matching import check_detections
from .one_image import OneImageProgram
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
    "detect",
    "postprocess",
]
