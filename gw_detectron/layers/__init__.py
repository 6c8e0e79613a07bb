"""Whitening layers in plain PyTorch; nothing here knows Detectron2."""

from .group_whitening import GroupWhitening2d
from .kernels import group_whiten, use_path
from .solvers import SOLVERS, newton_inverse_sqrt, zca_inverse_sqrt

__all__ = ["SOLVERS", "GroupWhitening2d", "group_whiten", "newton_inverse_sqrt", "use_path", "zca_inverse_sqrt"]
