"""Time and memory of group whitening beside its alternatives, as ratios that can be compared with earlier ones."""

from .compare import TOLERANCE, Comparison, compare
from .layer import benchmark_layer, planned_layer
from .layer_settings import MEMORY, MEMORY_SHAPES, SHAPES, LayerSettings, parse_shape, scaled
from .machine import pick_device
from .model import MODELS, ModelSettings, benchmark_model, models_with, planned_model, variants
from .networks import Sizes
from .output import output_files
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
    "compare",
    "draw",
    "models_with",
    "output_files",
    "parse_shape",
    "pick_device",
    "planned_layer",
    "planned_model",
    "read_csv",
    "scaled",
    "summary",
    "variants",
    "write_csv",
]
