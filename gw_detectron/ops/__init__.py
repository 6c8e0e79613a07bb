"""Whitening operations as functions: torch (and, where installed, Triton) alone, no modules, no Detectron2.

- ``group_whitening/reference.py``: the equations of Group Whitening; ``op.py``: the custom operator and its backends.
- ``batch_whitening/reference.py``: the equations of batch whitening.
- ``solvers/``: covariance -> whitening matrix.
"""
