"""Group Whitening for Detectron2. Importing it registers backbones, heads, weights and the synthetic data set."""

try:
    import detectron2  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "detectron2":
        raise
    raise ImportError(
        "gw_detectron needs Detectron2, which is not installed here: run `python tools/install_detectron2.py` from the "
        "gw_detectron repository, or follow https://detectron2.readthedocs.io/tutorials/install.html"
    ) from None

from . import modeling as _  # noqa: F401, registers the components
from .checkpoint import register_weights
from .config import add_gw_config
from .data.synthetic import register_synthetic
from .layers import BatchWhitening2d, GroupWhitening2d
from .modeling import norm_spec, norm_table, resolve_norm
from .version import __version__

__all__ = [
    "BatchWhitening2d",
    "GroupWhitening2d",
    "__version__",
    "add_gw_config",
    "norm_spec",
    "norm_table",
    "resolve_norm",
]

register_synthetic()
register_weights()
