"""Batch whitening over groups of channels: ``reference.py`` has the equations and runs on every device."""
