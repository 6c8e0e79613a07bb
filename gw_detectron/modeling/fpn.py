"""Detectron2's FPN on the backbones of :mod:`gw_detectron.modeling.resnet`, with any norm."""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN
from detectron2.modeling.backbone.fpn import LastLevelMaxPool, LastLevelP6P7
from torch import nn

from ..norms.names import resolve_norm
from .resnet import build_gw_resnet_backbone


@BACKBONE_REGISTRY.register()
def build_gw_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build ResNet + FPN for Faster and Mask R-CNN, levels p2-p6.

    Raises:
        ConfigError: a key is out of its range, or a norm is unknown or does not fit.
    """
    return _fpn(cfg, build_gw_resnet_backbone(cfg, input_shape), LastLevelMaxPool())


@BACKBONE_REGISTRY.register()
def build_gw_retinanet_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Build ResNet + FPN for RetinaNet, levels p3-p7.

    Raises:
        ConfigError: a key is out of its range, or a norm is unknown or does not fit.
    """
    bottom_up = build_gw_resnet_backbone(cfg, input_shape)
    top_block = LastLevelP6P7(bottom_up.output_shape()["res5"].channels, cfg.MODEL.FPN.OUT_CHANNELS)
    return _fpn(cfg, bottom_up, top_block)


def _fpn(cfg: CfgNode, bottom_up: nn.Module, top_block: nn.Module) -> FPN:
    options = cfg.MODEL.FPN
    return FPN(
        bottom_up=bottom_up,
        in_features=options.IN_FEATURES,
        out_channels=options.OUT_CHANNELS,
        norm=resolve_norm(options.NORM, where="MODEL.FPN.NORM", channels=[options.OUT_CHANNELS]),
        top_block=top_block,
        fuse_type=options.FUSE_TYPE,
    )
