"""Norms by name, for any model: parse, print, list, convert. Needs only torch."""

from .conversion import (
    CONVS,
    conv_names,
    convert_convs,
    convert_norms,
    mix_statistics,
    mixture_name,
)
from .listing import (
    can_start_from,
    evaluation_spec,
    is_same_norm,
    is_synchronized,
    norm_rows,
    norm_summary,
    norm_table,
)
from .names import (
    DETECTRON2_NORMS,
    Norm,
    build_norm,
    full_name,
    norm_options,
    norm_spec,
    resolve_norm,
)
from .positions import POSITIONS, check_positions, norms_at, whitened_convs

__all__ = [
    "CONVS",
    "DETECTRON2_NORMS",
    "POSITIONS",
    "Norm",
    "build_norm",
    "can_start_from",
    "check_positions",
    "conv_names",
    "convert_convs",
    "convert_norms",
    "evaluation_spec",
    "full_name",
    "is_same_norm",
    "is_synchronized",
    "mix_statistics",
    "mixture_name",
    "norm_options",
    "norm_rows",
    "norm_spec",
    "norm_summary",
    "norm_table",
    "norms_at",
    "resolve_norm",
    "whitened_convs",
]
