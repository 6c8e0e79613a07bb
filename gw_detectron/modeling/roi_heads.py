"""Detectron2's heads on regions with any norm."""

from collections.abc import Iterable, Sequence
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import Conv2d, ShapeSpec
from detectron2.modeling.roi_heads import (
    ROI_BOX_HEAD_REGISTRY,
    ROI_HEADS_REGISTRY,
    ROI_MASK_HEAD_REGISTRY,
    FastRCNNConvFCHead,
    MaskRCNNConvUpsampleHead,
    Res5ROIHeads,
)
from torch import nn

from ..config import changed_config, get_value
from ..errors import ConfigError
from ..norms import convert_convs
from .any_norm_head import AnyNormHead
from .resnet import build_gw_resnet_backbone


class _RegionHead(AnyNormHead):
    """Mixin for a stock head on regions: any norm, and Weight Standardization (``conv="WS"``)."""

    conv_norm_relus: list[Conv2d]  # the stock head's convolutions

    @configurable
    def __init__(self, *args: Any, conv: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        convert_convs(self, conv, where=self.norm_key.replace("NORM", "CONV"))

    @classmethod
    def from_config(cls, cfg: CfgNode, *args: Any) -> dict[str, Any]:
        return super().from_config(cfg, *args) | {"conv": get_value(cfg, cls.norm_key.replace("NORM", "CONV"))}

    def relu_convs(self) -> Iterable[Conv2d]:
        return self.conv_norm_relus


@ROI_BOX_HEAD_REGISTRY.register()
class GWFastRCNNConvFCHead(_RegionHead, FastRCNNConvFCHead):
    """Box head of convolutions and fully connected layers with any norm.

    Args:
        single_relu: keep only the ReLU after the last convolution. The authors' released code has this head. The paper
            and GroupNorm's 4conv1fc have a ReLU after every convolution.
        args, kwargs: those of Detectron2's ``FastRCNNConvFCHead``, see :class:`.AnyNormHead` for ``conv_norm``.
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
class GWMaskRCNNConvUpsampleHead(_RegionHead, MaskRCNNConvUpsampleHead):
    """Mask head of convolutions and an upsampling layer with any norm.

    Args:
        args, kwargs: those of Detectron2's ``MaskRCNNConvUpsampleHead``, see :class:`.AnyNormHead` for ``conv_norm``.
    """

    norm_key = "MODEL.ROI_MASK_HEAD.NORM"

    @staticmethod
    def norm_channels(conv_dims: Sequence[int]) -> Iterable[int]:
        return conv_dims[:-1]  # the last one is of the upsampling layer


@ROI_HEADS_REGISTRY.register()
class GWRes5ROIHeads(Res5ROIHeads):
    """Heads of a C4 detector whose res5 has the norms of the backbone.

    The last stage of the ResNet follows the region pooling. It has ``MODEL.RESNETS.WHITEN_NORM`` at
    ``WHITEN_POSITIONS``, as the stages before it, so that it takes the weights of a whole ResNet.

    Args:
        args, kwargs: those of Detectron2's ``Res5ROIHeads``.

    Raises:
        ConfigError: a key of ``MODEL.RESNETS`` is out of its range, or a norm does not fit.
    """

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        # Private, but Detectron2 v0.5, v0.6 and main of 2026 call it as this class method.
        if cfg.MODEL.RESNETS.DEFORM_ON_PER_STAGE[-1]:
            raise ConfigError(
                f"MODEL.RESNETS.DEFORM_ON_PER_STAGE ({cfg.MODEL.RESNETS.DEFORM_ON_PER_STAGE}): res5 behind region "
                "pooling cannot be deformable. Fix: set its last value to False."
            )
        # the last stage of a whole ResNet, so that one place decides norms, blocks and strides
        whole = changed_config(cfg, {"MODEL.RESNETS.OUT_FEATURES": ["res5"], "MODEL.BACKBONE.FREEZE_AT": 0})
        resnet = build_gw_resnet_backbone(whole, ShapeSpec(channels=len(cfg.MODEL.PIXEL_MEAN)))
        return resnet.res5, resnet.output_shape()["res5"].channels
