"""Norms by name, for any model: parse, print, list, convert. Works with torch alone."""

from .conversion import ConversionReport, convert_norms
from .convs import convert_convs
from .installed import Norm
from .names import norm_options, norm_spec, resolve_norm
from .norm_listing import norm_rows, norm_summary, norm_table
from .positions import POSITIONS, whitened_convs

__all__ = [
    "POSITIONS",
    "ConversionReport",
    "Norm",
    "convert_convs",
    "convert_norms",
    "norm_options",
    "norm_rows",
    "norm_spec",
    "norm_summary",
    "norm_table",
    "resolve_norm",
    "whitened_convs",
]
