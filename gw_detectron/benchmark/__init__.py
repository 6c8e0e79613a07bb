"""Time and memory of group whitening beside its alternatives, as ratios that can be compared with earlier ones."""

from .compare import TOLERANCE, Comparison, check_reference, compare
from .layer import benchmark_layer
from .layer_settings import MEMORY, MEMORY_SHAPES, SHAPES, LayerSettings, parse_shape, scaled
from .machine import pick_device
from .model import MODELS, ModelSettings, benchmark_model, variants
from .networks import Sizes
from .picture import draw
from .providers import MODES, OPTIONAL, PRECISIONS, PROVIDERS
from .summary import summary
from .table import Table, read_csv, write_csv

__all__ = [
    "MEMORY",
    "MEMORY_SHAPES",
    "MODELS",
    "MODES",
    "OPTIONAL",
    "PRECISIONS",
    "PROVIDERS",
    "SHAPES",
    "TOLERANCE",
    "Comparison",
    "LayerSettings",
    "ModelSettings",
    "Sizes",
    "Table",
    "benchmark_layer",
    "benchmark_model",
    "check_reference",
    "compare",
    "draw",
    "parse_shape",
    "pick_device",
    "read_csv",
    "scaled",
    "summary",
    "variants",
    "write_csv",
]
