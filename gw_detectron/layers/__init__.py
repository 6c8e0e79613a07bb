"""Whitening layers in plain PyTorch; nothing here knows Detectron2."""

from .functional import group_whiten
from .group_whitening import GroupWhitening2d
from .solvers import SOLVERS, newton_inverse_sqrt, zca_inverse_sqrt

__all__ = ["SOLVERS", "GroupWhitening2d", "group_whiten", "newton_inverse_sqrt", "zca_inverse_sqrt"]
