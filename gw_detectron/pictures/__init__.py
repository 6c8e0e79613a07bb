"""Pictures of detections, with one color for each class."""

from .drawing import class_colors, draw_objects, draw_predictions, draw_record, plain_text

__all__ = ["class_colors", "draw_objects", "draw_predictions", "draw_record", "plain_text"]
