"""Predictions of a trained detector on images and videos."""

from ..images.drawing import draw_predictions, draw_record
from .predictor import Predictor, open_predictor
from .preview import write_preview
from .results_folder import PredictionSummary, check_output, write_predictions
from .sources import find_sources
from .tiled_predictor import TiledPredictor

__all__ = [
    "PredictionSummary",
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
