"""Which norm for my data? Train each the same way, and compare AP after equal iterations and equal time."""

from .comparison import PAGE, RECOMMENDED, Comparison, compare

__all__ = ["PAGE", "RECOMMENDED", "Comparison", "compare"]
