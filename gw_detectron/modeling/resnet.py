"""ResNet and ResNeXt backbones with one norm at chosen positions and another everywhere else.

The positions carry the paper's names (Group Whitening, section 5.1.1): ``S1`` is the stem, ``B1``, ``B2``, ``B3`` the
first, second, third norm of every block, ``B12`` the first two.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, ResNet
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock, DeformBottleneckBlock
from torch import Tensor, nn

from ..layers import FrozenBatchWhitening2d
from .norm import Norm, resolve_norm
from .relu import append_relu

NUM_BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}

_CONVS_BY_POSITION: dict[str, tuple[str, ...]] = {
    "": (),
    "S1": (),
    "S1-B1": ("conv1",),
    "S1-B2": ("conv2",),
    "S1-B3": ("conv3",),
    "S1-B12": ("conv1", "conv2"),
    "ALL": ("conv1", "conv2", "conv3", "shortcut"),
}
POSITIONS = tuple(_CONVS_BY_POSITION)


def whitened_convs(positions: str, *, bottleneck: bool = True) -> tuple[str, ...]:
    """The convolutions of a residual block whose norm stands at ``positions``.

    Args:
        positions: one of ``"" S1 S1-B1 S1-B2 S1-B3 S1-B12 ALL``.
        bottleneck: False for the two-convolution blocks of ResNet-18 and -34, which have no third norm.

    Raises:
        ValueError: unknown positions, or ``S1-B3`` for a block of two convolutions.
    """
    if positions not in _CONVS_BY_POSITION:
        raise ValueError(f"MODEL.RESNETS.WHITEN_POSITIONS={positions!r}; allowed are {list(POSITIONS)}")
    if bottleneck:
        return _CONVS_BY_POSITION[positions]
    if positions == "S1-B3":
        raise ValueError(
            "MODEL.RESNETS.WHITEN_POSITIONS='S1-B3' needs bottleneck blocks; ResNet-18 and -34 have two norms a block"
        )
    return tuple(conv for conv in _CONVS_BY_POSITION[positions] if conv != "conv3")


class _FreezesBatchWhitening(CNNBlockBase):
    """Mixin of a stock stem or block, which when frozen replaces BN only by its frozen twin."""

    def freeze(self) -> nn.Module:
        super().freeze()
        return FrozenBatchWhitening2d.convert(self)


class GWBasicStem(_FreezesBatchWhitening, BasicStem):
    """The stem of all ResNets here; batch whitening in it can be frozen, and group whitening applies the ReLU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        append_relu(self.conv1)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.conv1(x), kernel_size=3, stride=2, padding=1)


class _WhitenedBlock(_FreezesBatchWhitening):
    """Mixin of a stock block: ``whiten_norm`` replaces the norm of the convolutions named in ``whiten_convs``.

    The norm is set in the constructor because ``ResNet`` freezes its blocks as soon as it has them.
    """

    def __init__(self, *args: Any, whiten_norm: Norm = "", whiten_convs: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in whiten_convs:
            conv = getattr(self, name)
            if conv is not None:  # a block that keeps its shape has no shortcut convolution
                conv.norm = get_norm(whiten_norm, conv.out_channels)


class GWBasicBlock(_WhitenedBlock, BasicBlock):
    """The block of ResNet-18 and -34 with another norm at chosen convolutions; group whitening applies the ReLU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        append_relu(self.conv1)

    def forward(self, x: Tensor) -> Tensor:
        return _add_shortcut(self.conv2(self.conv1(x)), x if self.shortcut is None else self.shortcut(x))


class GWBottleneckBlock(_WhitenedBlock, BottleneckBlock):
    """The block of ResNet-50 and deeper, and of ResNeXt; otherwise as :class:`GWBasicBlock`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        append_relu(self.conv1)
        append_relu(self.conv2)

    def forward(self, x: Tensor) -> Tensor:
        return _add_shortcut(self.conv3(self.conv2(self.conv1(x))), x if self.shortcut is None else self.shortcut(x))


def _add_shortcut(out: Tensor, shortcut: Tensor) -> Tensor:
    out += shortcut
    return F.relu_(out)


class GWDeformBottleneckBlock(_WhitenedBlock, DeformBottleneckBlock):
    """A bottleneck block with a deformable 3x3 convolution and another norm at chosen convolutions, before its ReLU."""


@BACKBONE_REGISTRY.register()
def build_gw_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Builds a ResNet or ResNeXt whose norms are ``NORM``, and ``WHITEN_NORM`` at ``WHITEN_POSITIONS``.

    All other keys of ``MODEL.RESNETS`` and ``MODEL.BACKBONE.FREEZE_AT`` mean what they mean to Detectron2's
    ``build_resnet_backbone``.

    Raises:
        ValueError: a key of ``MODEL.RESNETS`` is out of its range, or a norm does not fit.
    """
    options = cfg.MODEL.RESNETS
    _check_options(options)
    bottleneck = options.DEPTH >= 50
    convs = whitened_convs(options.WHITEN_POSITIONS, bottleneck=bottleneck)
    channels = _norm_channels(options, bottleneck)
    norm = resolve_norm(options.NORM, where="MODEL.RESNETS.NORM", channels=channels)
    whiten_norm: Norm = norm
    if options.WHITEN_POSITIONS:
        whiten_channels = channels if convs else [options.STEM_OUT_CHANNELS]
        whiten_norm = resolve_norm(options.WHITEN_NORM, where="MODEL.RESNETS.WHITEN_NORM", channels=whiten_channels)

    stem = GWBasicStem(in_channels=input_shape.channels, out_channels=options.STEM_OUT_CHANNELS, norm=whiten_norm)
    stages = []
    in_channels = options.STEM_OUT_CHANNELS
    for index, num_blocks in enumerate(NUM_BLOCKS_PER_STAGE[options.DEPTH]):
        dilation = options.RES5_DILATION if index == 3 else 1
        first_stride = 1 if index == 0 or dilation == 2 else 2
        out_channels = options.RES2_OUT_CHANNELS * 2**index
        arguments: dict[str, Any] = {
            "stride_per_block": [first_stride] + [1] * (num_blocks - 1),
            "in_channels": in_channels,
            "out_channels": out_channels,
            "norm": norm,
            "whiten_norm": whiten_norm,
            "whiten_convs": convs,
        }
        block_class: type[nn.Module] = GWBasicBlock
        if bottleneck:
            block_class = GWBottleneckBlock
            arguments |= {
                "bottleneck_channels": options.NUM_GROUPS * options.WIDTH_PER_GROUP * 2**index,
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
        in_channels = out_channels
    return ResNet(stem, stages, out_features=options.OUT_FEATURES, freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT)


def add_pool_norm(classifier: nn.Module, norm: Norm, channels: int) -> None:
    """Puts a norm between the last average pooling of a ResNet and its classifier, to learn decorrelated features.

    Args:
        classifier: Detectron2's or torchvision's ResNet, whose pooling is ``avgpool``. The norm becomes its
            ``avgpool.norm``.
        norm: a norm name or what :func:`resolve_norm` returns for one.
        channels: of the last feature map.

    Raises:
        ValueError: the norm is unknown or does not fit.

    Source: Group Whitening, section 5.1.1; supplement, section 6.1.
    """
    if isinstance(norm, str):
        norm = resolve_norm(norm, where="the norm after the last pooling", channels=[channels])
    layers = {"pool": classifier.avgpool, "norm": get_norm(norm, channels)}
    classifier.avgpool = nn.Sequential(OrderedDict(layers))


def _check_options(options: CfgNode) -> None:
    if options.DEPTH not in NUM_BLOCKS_PER_STAGE:
        raise ValueError(f"MODEL.RESNETS.DEPTH={options.DEPTH}; allowed are {sorted(NUM_BLOCKS_PER_STAGE)}")
    if options.RES5_DILATION not in (1, 2):
        raise ValueError(f"MODEL.RESNETS.RES5_DILATION={options.RES5_DILATION}; allowed are 1 and 2")
    if options.DEPTH < 50:
        required = {"RES2_OUT_CHANNELS": 64, "NUM_GROUPS": 1, "RES5_DILATION": 1, "DEFORM_ON_PER_STAGE": [False] * 4}
        for key, value in required.items():
            if options[key] != value:
                raise ValueError(
                    f"MODEL.RESNETS.{key}={options[key]} does not go with ResNet-{options.DEPTH}; set it to {value}"
                )


def _norm_channels(options: CfgNode, bottleneck: bool) -> list[int]:
    """The channel counts of the norms of stem and blocks."""
    counts = [options.STEM_OUT_CHANNELS]
    for index in range(4):
        counts.append(options.RES2_OUT_CHANNELS * 2**index)
        if bottleneck:
            counts.append(options.NUM_GROUPS * options.WIDTH_PER_GROUP * 2**index)
    return counts
