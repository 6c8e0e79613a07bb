"""Predictions of a trained detector on images and videos."""

from ..images.drawing import draw_predictions, draw_record
from .image_sources import find_sources
from .open_predictor import Predictor, open_predictor
from .results_folder import check_output, write_predictions, write_preview
from .tiles import TiledPredictor

__all__ = [
    "Predictor",
    "TiledPredictor",
    "check_output",
    "draw_predictions",
    "draw_record",
    "find_sources",
    "open_predictor",
    "write_predictions",
    "write_preview",
]
