"""Detectron2's heads on regions with any norm.

The layers, and so the weights, and all arguments that are not described are the stock heads'. ``conv_norm`` is a norm
name or an argument of Detectron2's ``get_norm``; one that is unknown or does not fit is a ConfigError.
"""

from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling.roi_heads import (
    ROI_BOX_HEAD_REGISTRY,
    ROI_HEADS_REGISTRY,
    ROI_MASK_HEAD_REGISTRY,
    FastRCNNConvFCHead,
    MaskRCNNConvUpsampleHead,
    Res5ROIHeads,
)
from torch import nn

from ..config import changed_config
from ..norms import Norm, convert_convs, resolve_norm
from .convs import append_fusible_relu
from .resnet import build_gw_resnet_backbone


class _AnyNorm(nn.Module):
    """Mixin for a stock head of convolutions, whose keys are in the node ``MODEL.{node}``."""

    node: str
    conv_norm_relus: list[Any]

    @configurable
    def __init__(
        self, *args: Any, conv_norm: Norm = "", conv: str = "", **kwargs: Any
    ) -> None:
        where = f"{type(self).__name__}, MODEL.{self.node}.NORM"
        conv_norm = resolve_norm(conv_norm, where=where)
        super().__init__(*args, conv_norm=conv_norm, **kwargs)
        for layer in self.conv_norm_relus:
            append_fusible_relu(layer)
        convert_convs(self, conv, where=f"MODEL.{self.node}.CONV")

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        stock: Any = super()
        arguments = stock.from_config(cfg, input_shape)
        return arguments | {"conv": cfg.MODEL[cls.node].CONV}


@ROI_BOX_HEAD_REGISTRY.register()
class GWFastRCNNConvFCHead(_AnyNorm, FastRCNNConvFCHead):
    """Box head of convolutions and fully connected layers with any norm, and fused ReLUs.

    Args:
        conv: "WS" standardizes the weights of the convolutions, see :func:`gw_detectron.convert_convs`.
        single_relu: keep only the ReLU after the last convolution. The authors' released code has this head. The paper
            and GroupNorm's 4conv1fc have a ReLU after every convolution.
    """

    node = "ROI_BOX_HEAD"

    @configurable
    def __init__(self, *args: Any, single_relu: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if single_relu:
            for layer in self.conv_norm_relus[:-1]:
                layer.activation = None

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        arguments = super().from_config(cfg, input_shape)
        return arguments | {"single_relu": cfg.MODEL.ROI_BOX_HEAD.SINGLE_RELU}


@ROI_MASK_HEAD_REGISTRY.register()
class GWMaskRCNNConvUpsampleHead(_AnyNorm, MaskRCNNConvUpsampleHead):
    """Mask head of convolutions and an upsampling layer with any norm, and fused ReLUs.

    ``conv`` as in :class:`GWFastRCNNConvFCHead`.
    """

    node = "ROI_MASK_HEAD"


@ROI_HEADS_REGISTRY.register()
class GWRes5ROIHeads(Res5ROIHeads):
    """Heads of a C4 detector whose res5 has the norms of the backbone.

    The last stage of the ResNet follows the region pooling. It has ``MODEL.RESNETS.WHITEN_NORM`` at
    ``WHITEN_POSITIONS``, as the stages before it, so that it takes the weights of a whole ResNet.
    """

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        # Private, but Detectron2 v0.6 and main of 2026 call it as this class method.
        # The last stage of a whole ResNet, so that one place decides norms, blocks and strides
        whole = changed_config(
            cfg, {"MODEL.RESNETS.OUT_FEATURES": ["res5"], "MODEL.BACKBONE.FREEZE_AT": 0}
        )
        resnet = build_gw_resnet_backbone(
            whole, ShapeSpec(channels=len(cfg.MODEL.PIXEL_MEAN))
        )
        return resnet.res5, resnet.output_shape()["res5"].channels
