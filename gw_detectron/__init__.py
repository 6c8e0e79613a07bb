"""Whitening layers for PyTorch, and a Detectron2 plugin made of them.

With only torch, ``gw_detectron.layers``, ``ops`` and ``norms`` work. With Detectron2 installed, importing this package
also registers its backbones, heads and weights. The workbench for own data is loaded when it is used.
"""

import importlib
from typing import Any

from .installation import (
    __version__,
    has_detectron2,
    require_detectron2,
    scripting_warnings_ignored,
)
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
    from .weights import register_weights

    __all__ += ["Trainer", "add_gw_config", "auto_config"]
    register_weights()

#: names that need Detectron2, by their modules; those of the workbench are imported at their first use
_LAZY = {
    "Trainer": "gw_detectron.workbench.run",
    "add_gw_config": "gw_detectron.config",
    "auto_config": "gw_detectron.workbench.dataset",
}


def __getattr__(name: str) -> Any:
    """Import a name of the workbench; without Detectron2, say what to install."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_detectron2(f"gw_detectron.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
