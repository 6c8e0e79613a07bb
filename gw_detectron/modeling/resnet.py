"""ResNet and ResNeXt backbones with another norm at chosen positions, see :mod:`gw_detectron.norms.positions`."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, ResNet
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock, DeformBottleneckBlock
from torch import Tensor, nn

from ..errors import ConfigError
from ..layers import FrozenBatchWhitening2d
from ..norms import Norm, resolve_norm, whitened_convs
from .conv_norm_relu import append_fusible_relu

NUM_BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


class _Component(CNNBlockBase):
    """Mixin for a stock stem or block: fused ReLUs.

    ``freeze()`` also freezes batch whitening.
    """

    relu_convs: tuple[str, ...] = ()  # convolutions with a ReLU behind their norm

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.relu_convs:
            append_fusible_relu(getattr(self, name))

    def freeze(self) -> nn.Module:
        super().freeze()
        return FrozenBatchWhitening2d.convert(self)


class GWBasicStem(_Component, BasicStem):
    """Stem of ResNet, in which Group Whitening and the ReLU are fused.

    Args:
        args, kwargs: those of Detectron2's ``BasicStem``.
    """

    relu_convs = ("conv1",)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.conv1(x), kernel_size=3, stride=2, padding=1)


class _WhitenedBlock(_Component):
    """Mixin for a stock block: another norm at chosen convolutions as well.

    Args:
        args, kwargs: those of the stock block.
        whiten_norm: an argument of Detectron2's ``get_norm``.
        whiten_convs: names of the convolutions that get ``whiten_norm``.
    """

    def __init__(self, *args: Any, whiten_norm: Norm = "", whiten_convs: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Set the norms here, not in the built network: the constructor of ResNet freezes its blocks.
        for name in whiten_convs:
            conv = getattr(self, name)
            if conv is not None:  # an identity shortcut has no convolution
                conv.norm = get_norm(whiten_norm, conv.out_channels)


class GWBasicBlock(_WhitenedBlock, BasicBlock):
    """Block of ResNet-18 and -34 with another norm at chosen convolutions.

    Args: those of Detectron2's ``BasicBlock``, ``whiten_norm`` and ``whiten_convs``.
    """

    relu_convs = ("conv1",)

    def forward(self, x: Tensor) -> Tensor:
        return _add_shortcut(self.conv2(self.conv1(x)), x if self.shortcut is None else self.shortcut(x))


class GWBottleneckBlock(_WhitenedBlock, BottleneckBlock):
    """Bottleneck block with another norm at chosen convolutions.

    ResNeXt and ResNets from 50 layers up consist of it.

    Args: those of Detectron2's ``BottleneckBlock``, ``whiten_norm`` and ``whiten_convs``.
    """

    relu_convs = ("conv1", "conv2")

    def forward(self, x: Tensor) -> Tensor:
        return _add_shortcut(self.conv3(self.conv2(self.conv1(x))), x if self.shortcut is None else self.shortcut(x))


def _add_shortcut(out: Tensor, shortcut: Tensor) -> Tensor:
    out += shortcut
    return F.relu_(out)


class GWDeformBottleneckBlock(_WhitenedBlock, DeformBottleneckBlock):
    """Bottleneck block with a deformable convolution and another norm at chosen convolutions.

    Its ReLUs are not fused. Args: those of Detectron2's ``DeformBottleneckBlock``, ``whiten_norm``, ``whiten_convs``.
    """


@BACKBONE_REGISTRY.register()
def build_gw_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Build a ResNet or ResNeXt with ``WHITEN_NORM`` at ``WHITEN_POSITIONS``.

    All other norms are ``MODEL.RESNETS.NORM``. All other keys of ``MODEL.RESNETS`` and ``MODEL.BACKBONE.FREEZE_AT``
    have the meaning that Detectron2's ``build_resnet_backbone`` gives them.

    Raises:
        ConfigError: a key of ``MODEL.RESNETS`` is out of its range, or a norm does not fit.
    """
    options = cfg.MODEL.RESNETS
    _check_options(options)
    bottleneck = options.DEPTH >= 50
    convs = whitened_convs(options.WHITEN_POSITIONS, bottleneck=bottleneck, where="MODEL.RESNETS.WHITEN_POSITIONS")
    stem_channels = options.STEM_OUT_CHANNELS
    out_channels = [options.RES2_OUT_CHANNELS * 2**stage for stage in range(4)]
    bottleneck_channels = [options.NUM_GROUPS * options.WIDTH_PER_GROUP * 2**stage for stage in range(4)]
    channels = [stem_channels, *out_channels, *(bottleneck_channels if bottleneck else [])]
    norm = resolve_norm(options.NORM, where="MODEL.RESNETS.NORM", channels=channels)
    whiten_norm: Norm = norm
    if options.WHITEN_POSITIONS:
        whiten_channels = channels if convs else [stem_channels]
        whiten_norm = resolve_norm(options.WHITEN_NORM, where="MODEL.RESNETS.WHITEN_NORM", channels=whiten_channels)

    stem = GWBasicStem(in_channels=input_shape.channels, out_channels=stem_channels, norm=whiten_norm)
    stages = []
    for index, num_blocks in enumerate(NUM_BLOCKS_PER_STAGE[options.DEPTH]):
        dilation = options.RES5_DILATION if index == 3 else 1
        first_stride = 1 if index == 0 or dilation == 2 else 2
        arguments: dict[str, Any] = {
            "stride_per_block": [first_stride] + [1] * (num_blocks - 1),
            "in_channels": out_channels[index - 1] if index else stem_channels,
            "out_channels": out_channels[index],
            "norm": norm,
            "whiten_norm": whiten_norm,
            "whiten_convs": convs,
        }
        block_class: type[nn.Module] = GWBasicBlock
        if bottleneck:
            block_class = GWBottleneckBlock
            arguments |= {
                "bottleneck_channels": bottleneck_channels[index],
                "stride_in_1x1": options.STRIDE_IN_1X1,
                "dilation": dilation,
                "num_groups": options.NUM_GROUPS,
            }
            if options.DEFORM_ON_PER_STAGE[index]:
                block_class = GWDeformBottleneckBlock
                arguments |= {
                    "deform_modulated": options.DEFORM_MODULATED,
                    "deform_num_groups": options.DEFORM_NUM_GROUPS,
                }
        stages.append(ResNet.make_stage(block_class, num_blocks, **arguments))
    return ResNet(stem, stages, out_features=options.OUT_FEATURES, freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT)


def add_pool_norm(classifier: nn.Module, norm: Norm, channels: int) -> None:
    """Put a norm between average pooling and classifier, to learn decorrelated features.

    Args:
        classifier: Detectron2's or torchvision's ResNet, whose pooling is ``avgpool``. The norm becomes its
            ``avgpool.norm``.
        norm: a norm name, or the result of :func:`resolve_norm`.
        channels: channels of the last feature map.

    Raises:
        ConfigError: the norm is unknown or does not fit.

    Source: Group Whitening, section 5.1.1; supplement, section 6.1.
    """
    if isinstance(norm, str):
        norm = resolve_norm(norm, where="add_pool_norm", channels=[channels])
    layers = {"pool": classifier.avgpool, "norm": get_norm(norm, channels)}
    classifier.avgpool = nn.Sequential(OrderedDict(layers))


def _check_options(options: CfgNode) -> None:
    allowed: dict[str, list[Any]] = {"DEPTH": sorted(NUM_BLOCKS_PER_STAGE), "RES5_DILATION": [1, 2]}
    for key, values in allowed.items():
        if options[key] not in values:
            raise ConfigError(f"MODEL.RESNETS.{key} ({options[key]!r}): not supported. Fix: use one of {values}.")
    if options.DEPTH < 50:
        required = {"RES2_OUT_CHANNELS": 64, "NUM_GROUPS": 1, "RES5_DILATION": 1, "DEFORM_ON_PER_STAGE": [False] * 4}
        for key, value in required.items():
            if options[key] != value:
                raise ConfigError(
                    f"MODEL.RESNETS.{key} ({options[key]!r}): ResNet-{options.DEPTH} does not support it. "
                    f"Fix: set it to {value}."
                )
