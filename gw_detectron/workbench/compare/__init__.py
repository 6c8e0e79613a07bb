"""Comparison of norms: AP after equal iterations and equal time, and which one to take."""

from .comparison import Comparison
from .running import PAGE, RECOMMENDED, compare

__all__ = ["PAGE", "RECOMMENDED", "Comparison", "compare"]
