"""Analyze norm layers: constraints on outputs, and whitening statistics."""

from .constraint_analysis import analyze_constraints
from .layer_analysis import analyze_layers
from .result import AnalysisResult
from .whitening_stats_hook import WhiteningStatsHook

__all__ = [
    "AnalysisResult",
    "WhiteningStatsHook",
    "analyze_constraints",
    "analyze_layers",
]
