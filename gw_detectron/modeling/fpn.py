"""Detectron2's FPN with any norm, on the backbones of :mod:`gw_detectron.modeling.resnet`."""

from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import nn

from ..norms import Norm, convert_convs, resolve_norm
from .resnet import build_gw_resnet_backbone


class GWFPN(FPN):
    """FPN with any norm; other arguments as in Detectron2's ``FPN``.

    Args:
        norm: a norm name, or an argument of Detectron2's ``get_norm``. One that does not fit is a NormError.
        conv: "WS" standardizes the weights of its convolutions, see :func:`gw_detectron.convert_convs`.
    """

    def __init__(
        self,
        bottom_up: Backbone,
        in_features: list[str],
        out_channels: int,
        norm: Norm = "",
        *,
        conv: str = "",
        **kwargs: Any,
    ) -> None:
        norm = resolve_norm(norm, where="GWFPN, MODEL.FPN.NORM")
        super().__init__(bottom_up, in_features, out_channels, norm, **kwargs)
        convert_convs(self, conv, "fpn_*", where="MODEL.FPN.CONV")


@BACKBONE_REGISTRY.register()
def build_gw_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build ResNet + FPN for Faster and Mask R-CNN, levels p2-p6."""
    return _fpn(cfg, build_gw_resnet_backbone(cfg, input_shape), LastLevelMaxPool())


@BACKBONE_REGISTRY.register()
def build_gw_retinanet_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build ResNet + FPN for RetinaNet, levels p3-p7."""
    bottom_up = build_gw_resnet_backbone(cfg, input_shape)
    top_block = LastLevelP6P7(
        bottom_up.output_shape()["res5"].channels, cfg.MODEL.FPN.OUT_CHANNELS
    )
    return _fpn(cfg, bottom_up, top_block)


def _fpn(cfg: CfgNode, bottom_up: nn.Module, top_block: nn.Module) -> FPN:
    options = cfg.MODEL.FPN
    return GWFPN(
        bottom_up,
        options.IN_FEATURES,
        options.OUT_CHANNELS,
        options.NORM,
        conv=options.CONV,
        top_block=top_block,
        fuse_type=options.FUSE_TYPE,
    )
