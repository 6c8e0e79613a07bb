"""The papers' own analyses, of formulas, of random features, of small networks, and of a detector's layers."""

from .conditioning import analyze_conditioning
from .constraints import analyze_constraints
from .diversity import analyze_diversity
from .layers import analyze_layers
from .outcome import Outcome
from .swapping import analyze_swapping
from .watch import WhiteningWatch

__all__ = [
    "Outcome",
    "WhiteningWatch",
    "analyze_conditioning",
    "analyze_constraints",
    "analyze_diversity",
    "analyze_layers",
    "analyze_swapping",
]
