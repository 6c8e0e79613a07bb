"""Detectron2's box and mask heads with any norm name. The layers, and so the weights, are the stock ones.

Group whitening applies the ReLU behind it.
"""

from collections.abc import Iterable
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling.roi_heads import (
    ROI_BOX_HEAD_REGISTRY,
    ROI_MASK_HEAD_REGISTRY,
    FastRCNNConvFCHead,
    MaskRCNNConvUpsampleHead,
)

from .norm import resolve_norm
from .relu import append_relu


@ROI_BOX_HEAD_REGISTRY.register()
class GWFastRCNNConvFCHead(FastRCNNConvFCHead):
    """Box head of convolutions and fully connected layers ("2fc", "4conv1fc") with any norm.

    Args:
        single_relu: keep only the ReLU after the last convolution. This is the head of the authors' released code;
            the paper and GroupNorm's 4conv1fc have a ReLU after every convolution.
        args, kwargs: those of Detectron2's ``FastRCNNConvFCHead``; ``conv_norm`` may be a norm class or partial.

    Raises:
        ValueError: the norm is unknown or does not fit.
    """

    @configurable
    def __init__(self, *args: Any, single_relu: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if single_relu:
            for conv in self.conv_norm_relus[:-1]:
                conv.activation = None
        _append_relus(self.conv_norm_relus)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        arguments = super().from_config(cfg, input_shape)
        arguments["conv_norm"] = resolve_norm(
            arguments["conv_norm"], where="MODEL.ROI_BOX_HEAD.NORM", channels=arguments["conv_dims"]
        )
        arguments["single_relu"] = cfg.MODEL.ROI_BOX_HEAD.SINGLE_RELU
        return arguments


@ROI_MASK_HEAD_REGISTRY.register()
class GWMaskRCNNConvUpsampleHead(MaskRCNNConvUpsampleHead):
    """Mask head of convolutions and an upsampling layer with any norm after the convolutions.

    Raises:
        ValueError: the norm is unknown or does not fit.
    """

    @configurable
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _append_relus(self.conv_norm_relus)

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        arguments = super().from_config(cfg, input_shape)
        arguments["conv_norm"] = resolve_norm(
            arguments["conv_norm"], where="MODEL.ROI_MASK_HEAD.NORM", channels=arguments["conv_dims"]
        )
        return arguments


def _append_relus(convs: Iterable[Any]) -> None:
    for conv in convs:
        if conv.activation is not None:
            append_relu(conv)
