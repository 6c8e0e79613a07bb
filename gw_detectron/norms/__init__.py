"""Norms by name, for any model: parse, print, list, convert. Needs only torch."""

from .conversion import CONVS, ConversionReport, conv_names, convert_convs, convert_norms
from .listing import (
    NormRow,
    evaluation_spec,
    is_synchronized,
    norm_counts,
    norm_rows,
    norm_summary,
    norm_table,
)
from .names import DETECTRON2_NORMS, Norm, build_norm, get_norm, norm_options, norm_spec, resolve_norm
from .positions import POSITIONS, norms_at, whitened_convs

__all__ = [
    "CONVS",
    "DETECTRON2_NORMS",
    "POSITIONS",
    "ConversionReport",
    "Norm",
    "NormRow",
    "build_norm",
    "conv_names",
    "convert_convs",
    "convert_norms",
    "evaluation_spec",
    "get_norm",
    "is_synchronized",
    "norm_counts",
    "norm_options",
    "norm_rows",
    "norm_spec",
    "norm_summary",
    "norm_table",
    "norms_at",
    "resolve_norm",
    "whitened_convs",
]
