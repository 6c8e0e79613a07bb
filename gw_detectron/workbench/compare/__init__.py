"""Comparison of norms: AP after equal iterations and equal time, and which one to take."""

from .comparison import PAGE, RECOMMENDED, Comparison, compare

__all__ = ["PAGE", "RECOMMENDED", "Comparison", "compare"]
