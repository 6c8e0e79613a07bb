"""Check config, weights and data before training starts."""

from ..errors import PreflightReport
from .checks import preflight
from .dataset_checks import wrong_evaluator

__all__ = ["PreflightReport", "preflight", "wrong_evaluator"]
