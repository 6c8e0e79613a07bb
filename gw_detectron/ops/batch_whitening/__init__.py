"""Batch whitening over groups of channels."""
