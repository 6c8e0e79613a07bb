"""Whitening operations as functions of torch (and, where installed, Triton).

- ``group_whitening/reference.py``: the equations of Group Whitening; ``op.py``: the custom operator and its backends.
- ``batch_whitening.py``: the equations of batch whitening.
- ``solvers/``: covariance -> whitening matrix.
"""
