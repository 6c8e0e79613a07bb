"""Benchmarks of Group Whitening against other layers and a lower bound, as ratios comparable across runs."""
