"""The norms of the installed libraries: Detectron2's, or else those of torch and torchvision."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..installation import has_detectron2, scripting_warnings_ignored

Norm = str | Callable[[int], nn.Module]


_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "BN": nn.BatchNorm2d,
    "SyncBN": nn.SyncBatchNorm,
    "GN": functools.partial(nn.GroupNorm, 32),
}
_frozen: list[Any] = []
with contextlib.suppress(ImportError, RuntimeError):  # torchvision is missing, or made for another torch
    from torchvision.ops import FrozenBatchNorm2d

    _BUILDERS["FrozenBN"] = FrozenBatchNorm2d
    _frozen.append(FrozenBatchNorm2d)

#: norm name -> its classes; a subclass comes before its base
CLASSES: dict[str, Any] = {"SyncBN": nn.SyncBatchNorm, "BN": nn.BatchNorm2d, "FrozenBN": tuple(_frozen)}

if has_detectron2():
    with scripting_warnings_ignored():
        import detectron2.layers
        import detectron2.layers.batch_norm as batch_norm

    # Detectron2's own channels-first LayerNorm is absent from v0.5; torch's LayerNorm is another layer
    CLASSES = {
        "naiveSyncBN": batch_norm.NaiveSyncBatchNorm,
        **CLASSES,
        "FrozenBN": (batch_norm.FrozenBatchNorm2d, *_frozen),
        "LN": getattr(batch_norm, "LayerNorm", ()),
    }
    get_norm = detectron2.layers.get_norm
else:

    def get_norm(norm: Norm, out_channels: int) -> nn.Module | None:
        """Build the layer of a norm name, as Detectron2's ``get_norm`` does.

        Raises:
            KeyError: an unknown name.
        """
        if isinstance(norm, str):
            return _BUILDERS[norm](out_channels) if norm else None
        return norm(out_channels)
