"""Batch whitening: the equations in ``reference.py`` run on every device."""
