"""Norm names in the constructor and in the config of a Detectron2 head."""

from collections.abc import Iterable
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import Conv2d
from torch import nn

from ..norms.names import resolve_norm
from .conv_norm_relu import append_fusible_relu


class AnyNormHead(nn.Module):
    """Mixin for a stock head: any norm name, and fused ReLUs.

    The layers, and so the weights, are those of the stock head.

    Args:
        args, kwargs: those of the stock head; the norm may be any norm name, or a class or partial of a norm layer.

    Raises:
        ConfigError: the norm is unknown or does not fit.
    """

    norm_key: str  # the config's key of the norm
    norm_argument = "conv_norm"  # the constructor's

    @configurable
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **self._resolve(kwargs, f"{type(self).__name__}: {self.norm_argument}"))
        for conv in self.relu_convs():
            append_fusible_relu(conv)

    @classmethod
    def from_config(cls, cfg: CfgNode, *args: Any) -> dict[str, Any]:
        return cls._resolve(super().from_config(cfg, *args), cls.norm_key)  # type: ignore[misc]

    def relu_convs(self) -> Iterable[Conv2d]:
        """Return the convolutions with a ReLU after their norm."""
        return ()

    @staticmethod
    def norm_channels(conv_dims: Any) -> Iterable[int]:
        """Return the channels of the norms, given the argument ``conv_dims`` of the stock head."""
        return conv_dims

    @classmethod
    def _resolve(cls, arguments: dict[str, Any], where: str) -> dict[str, Any]:
        norm = arguments.get(cls.norm_argument)
        if callable(norm):
            return arguments
        channels = cls.norm_channels(arguments["conv_dims"]) if arguments.get("conv_dims") else ()
        return arguments | {cls.norm_argument: resolve_norm(norm, where=where, channels=channels)}
