"""The papers' own analyses, of formulas, of random features, of small networks, and of a detector's layers."""

from .constraints import analyze_constraints
from .layers import analyze_layers
from .outcome import Outcome
from .watch import WhiteningWatch

__all__ = [
    "Outcome",
    "WhiteningWatch",
    "analyze_constraints",
    "analyze_layers",
]
