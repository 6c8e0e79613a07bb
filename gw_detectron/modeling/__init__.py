"""Detectron2 components with group whitening; importing this package registers them."""

from .build import build_checked_model
from .convs import ConvNormReLU
from .dense_heads import GWFCOSHead, GWRetinaNet, GWRetinaNetHead, GWSemSegFPNHead
from .fpn import (
    GWFPN,
    build_gw_resnet_fpn_backbone,
    build_gw_retinanet_resnet_fpn_backbone,
)
from .resnet import build_gw_resnet_backbone, gw_resnet
from .roi_heads import GWFastRCNNConvFCHead, GWMaskRCNNConvUpsampleHead, GWRes5ROIHeads

__all__ = [
    "GWFPN",
    "ConvNormReLU",
    "GWFCOSHead",
    "GWFastRCNNConvFCHead",
    "GWMaskRCNNConvUpsampleHead",
    "GWRes5ROIHeads",
    "GWRetinaNet",
    "GWRetinaNetHead",
    "GWSemSegFPNHead",
    "build_checked_model",
    "build_gw_resnet_backbone",
    "build_gw_resnet_fpn_backbone",
    "build_gw_retinanet_resnet_fpn_backbone",
    "gw_resnet",
]
