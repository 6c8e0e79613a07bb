"""Detectron2's box and mask heads with any norm.

The layers, and so the weights, are those of the stock heads. Group Whitening and the ReLU behind it are fused.
"""

from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling.roi_heads import (
    ROI_BOX_HEAD_REGISTRY,
    ROI_MASK_HEAD_REGISTRY,
    FastRCNNConvFCHead,
    MaskRCNNConvUpsampleHead,
)
from torch import nn

from ..config import get_value
from ..norms import convert_convs, resolve_norm
from .conv_norm_relu import append_fusible_relu


class _AnyNormHead(nn.Module):
    """Mixin for a stock head: any norm name, fused ReLUs, and Weight Standardization (``conv="WS"``)."""

    norm_key: str
    conv_norm_relus: list[Any]  # the stock head's convolutions

    @configurable
    def __init__(self, *args: Any, conv: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for layer in self.conv_norm_relus:
            append_fusible_relu(layer)
        convert_convs(self, conv, where=self.norm_key.replace("NORM", "CONV"))

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        arguments = super().from_config(cfg, input_shape)  # type: ignore[misc]
        norm = resolve_norm(arguments["conv_norm"], where=cls.norm_key, channels=arguments["conv_dims"])
        return arguments | {"conv_norm": norm, "conv": get_value(cfg, cls.norm_key.replace("NORM", "CONV"))}


@ROI_BOX_HEAD_REGISTRY.register()
class GWFastRCNNConvFCHead(_AnyNormHead, FastRCNNConvFCHead):
    """Box head of convolutions and fully connected layers with any norm.

    Args:
        single_relu: keep only the ReLU after the last convolution. The authors' released code has this head. The paper
            and GroupNorm's 4conv1fc have a ReLU after every convolution.
        args, kwargs: those of Detectron2's ``FastRCNNConvFCHead``; ``conv_norm`` may be a norm class or partial.

    Raises:
        ConfigError: the norm is unknown or does not fit.
    """

    norm_key = "MODEL.ROI_BOX_HEAD.NORM"

    @configurable
    def __init__(self, *args: Any, single_relu: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if single_relu:
            for conv in self.conv_norm_relus[:-1]:
                conv.activation = None

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        return super().from_config(cfg, input_shape) | {"single_relu": cfg.MODEL.ROI_BOX_HEAD.SINGLE_RELU}


@ROI_MASK_HEAD_REGISTRY.register()
class GWMaskRCNNConvUpsampleHead(_AnyNormHead, MaskRCNNConvUpsampleHead):
    """Mask head of convolutions and an upsampling layer with any norm.

    Args:
        args, kwargs: those of Detectron2's ``MaskRCNNConvUpsampleHead``; ``conv_norm`` may be a norm class or partial.

    Raises:
        ConfigError: the norm is unknown or does not fit.
    """

    norm_key = "MODEL.ROI_MASK_HEAD.NORM"
