"""Whitening layers for PyTorch, and a Detectron2 plugin made of them.

With only torch, ``gw_detectron.layers``, ``ops`` and ``norms`` work. With Detectron2 installed, importing this package
also registers its backbones, heads, weights and the synthetic dataset.
"""

from typing import Any

from .installation import __version__, has_detectron2, require_detectron2, scripting_warnings_ignored
from .layers import BatchWhitening2d, GroupWhitening2d
from .norms import convert_convs, convert_norms, norm_spec, norm_table, resolve_norm

__all__ = [
    "BatchWhitening2d",
    "GroupWhitening2d",
    "__version__",
    "convert_convs",
    "convert_norms",
    "norm_spec",
    "norm_table",
    "resolve_norm",
]

if has_detectron2():
    with scripting_warnings_ignored():
        from . import modeling as _  # noqa: F401, registers the components
    from .config import add_gw_config
    from .data import register_synthetic
    from .recipe import auto_config
    from .weights import register_weights

    __all__ += ["add_gw_config", "auto_config"]

    register_synthetic()
    register_weights()
else:

    def __getattr__(name: str) -> Any:
        """Say what to install where a name needs Detectron2."""
        if name in ("add_gw_config", "auto_config"):
            require_detectron2(f"gw_detectron.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
