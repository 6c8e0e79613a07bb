"""Group Whitening: equations in ``reference.py``, custom operator in ``op.py``."""
