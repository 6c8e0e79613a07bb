"""Group whitening: the reference, the custom operator and its backends."""
