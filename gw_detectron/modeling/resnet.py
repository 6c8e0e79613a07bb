"""ResNet and ResNeXt backbones with another norm at chosen positions, see :mod:`gw_detectron.norms.positions`."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, ResNet
from detectron2.modeling.backbone.resnet import (
    BasicBlock,
    BasicStem,
    BottleneckBlock,
    DeformBottleneckBlock,
    build_resnet_backbone,
)
from torch import Tensor, nn

from ..config import changed_config, default_config
from ..errors import ConfigError
from ..layers import FrozenBatchWhitening2d
from ..norms import Norm, convert_convs, resolve_norm, whitened_convs
from .convs import TorchvisionDeformConv, append_fusible_relu

STAGES = ("stem", "res2", "res3", "res4", "res5")
_DEPTHS = (18, 34, 50, 101, 152)


class _WhitenedBlock(CNNBlockBase):
    """Mixin for a stock stem or block: fused ReLUs, and ``freeze()`` also freezes batch whitening."""

    relu_convs: tuple[str, ...] = ()  # convolutions with a ReLU after their norm
    last_conv: str

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for name in self.relu_convs:
            out = _conv_relu(getattr(self, name), out)
        out = getattr(self, self.last_conv)(out)
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)

    def freeze(self) -> nn.Module:
        super().freeze()
        return FrozenBatchWhitening2d.convert(self)


def _conv_relu(conv: nn.Module, x: Tensor) -> Tensor:
    """Apply a convolution of a block; one that has replaced ours may have no activation."""
    x = conv(x)
    return F.relu_(x) if getattr(conv, "activation", None) is None else x


class GWBasicStem(_WhitenedBlock, BasicStem):
    """Stem of ResNet; Group Whitening and the ReLU are fused."""

    relu_convs = ("conv1",)

    def forward(self, x: Tensor) -> Tensor:
        x = _conv_relu(self.conv1, x)
        return F.max_pool2d(x, kernel_size=3, stride=2, padding=1)


class GWBasicBlock(_WhitenedBlock, BasicBlock):
    """Block of ResNet-18 and -34."""

    relu_convs = ("conv1",)
    last_conv = "conv2"


class GWBottleneckBlock(_WhitenedBlock, BottleneckBlock):
    """Bottleneck block of ResNeXt and deeper ResNets."""

    relu_convs = ("conv1", "conv2")
    last_conv = "conv3"


class GWDeformBottleneckBlock(_WhitenedBlock, DeformBottleneckBlock):
    """Bottleneck block with a deformable convolution. It trains on the CPU as well; its ReLUs are not fused."""

    forward = DeformBottleneckBlock.forward


_BLOCKS = {
    BasicStem: GWBasicStem,
    BasicBlock: GWBasicBlock,
    BottleneckBlock: GWBottleneckBlock,
    DeformBottleneckBlock: GWDeformBottleneckBlock,
}


def set_norms(
    network: nn.Module, norm: Norm, whiten_norm: Norm = "", positions: str = ""
) -> nn.Module:
    """Set the norms of a network of stock stems and blocks, in place; their classes become ours.

    Args:
        network: may also be one stem or block.
        norm, whiten_norm: arguments of Detectron2's ``get_norm``; the second one is for ``positions``.
    """
    blocks: list[Any] = [block for block in network.modules() if type(block) in _BLOCKS]
    for block in blocks:
        if isinstance(block, BasicStem):
            whitened: tuple[str, ...] = ("conv1",) if positions else ()
        else:
            is_bottleneck = not isinstance(block, BasicBlock)
            whitened = whitened_convs(
                positions, bottleneck=is_bottleneck, where="WHITEN_POSITIONS"
            )

        # Detectron2's builder has no argument for it
        block.__class__ = _BLOCKS[type(block)]
        for name in ("conv1", "conv2", "conv3", "shortcut"):
            conv = getattr(block, name, None)
            if conv is None:  # an identity shortcut
                continue
            chosen = whiten_norm if name in whitened else norm
            conv.norm = get_norm(chosen, conv.out_channels)
            if name in block.relu_convs:
                append_fusible_relu(conv)
        if isinstance(block, DeformBottleneckBlock):
            block.conv2.__class__ = TorchvisionDeformConv
    return network


def gw_resnet(
    depth: int = 50,
    positions: str = "S1-B2",
    norm: Norm = "FrozenBN",
    whiten_norm: Norm = "GW",
    *,
    in_channels: int = 3,
    out_features: Sequence[str] = ("res2", "res3", "res4", "res5"),
    freeze_at: int = 2,
    **options: Any,
) -> ResNet:
    """Build a ResNet or ResNeXt with another norm at the paper's positions.

    Args:
        depth: 18, 34, 50, 101 or 152.
        positions: see :func:`gw_detectron.norms.whitened_convs`.
        norm: norm name, or an argument of Detectron2's ``get_norm``, at all other positions.
        whiten_norm: the same for ``positions``.
        in_channels: channels of the image.
        out_features: names of the returned feature maps.
        freeze_at: freeze the first stages, the stem being 1; 0 freezes none.
        options: other keys of ``MODEL.RESNETS`` in lower case, such as ``num_groups=32, width_per_group=8`` of a
            ResNeXt. By default 3x3 convolutions downsample (``stride_in_1x1=False``), as in the weights of the authors,
            torchvision and timm.

    Raises:
        ConfigError: unknown depth or positions, or a norm that does not fit.

    Source: Group Whitening, section 5.1.
    """
    keys = {
        "depth": depth,
        "whiten_positions": positions,
        "out_features": out_features,
        "stride_in_1x1": False,
        "res2_out_channels": 64 if depth < 50 else 256,
    }
    cfg = default_config()
    for key, value in (keys | options).items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = list(value)  # a LazyConfig has lists of its own
        cfg.merge_from_list([f"MODEL.RESNETS.{key.upper()}", value])
    cfg.MODEL.BACKBONE.FREEZE_AT = freeze_at

    norm = resolve_norm(norm, where="gw_resnet, norm")
    whiten_norm = resolve_norm(whiten_norm, where="gw_resnet, whiten_norm")
    return _build(cfg, ShapeSpec(channels=in_channels), norm, whiten_norm)


@BACKBONE_REGISTRY.register()
def build_gw_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Build a ResNet or ResNeXt with ``WHITEN_NORM`` at ``WHITEN_POSITIONS``.

    All other norms are ``MODEL.RESNETS.NORM``. All other keys of ``MODEL.RESNETS`` and ``MODEL.BACKBONE.FREEZE_AT``
    have the meaning that Detectron2's ``build_resnet_backbone`` gives them.
    """
    keys = cfg.MODEL.RESNETS
    norm = resolve_norm(keys.NORM, where="MODEL.RESNETS.NORM")
    whiten_norm = resolve_norm(keys.WHITEN_NORM, where="MODEL.RESNETS.WHITEN_NORM")
    return _build(cfg, input_shape, norm, whiten_norm)


def _build(
    cfg: CfgNode, input_shape: ShapeSpec, norm: Norm, whiten_norm: Norm
) -> ResNet:
    keys = cfg.MODEL.RESNETS
    if keys.DEPTH not in _DEPTHS:
        raise ConfigError(
            f"MODEL.RESNETS.DEPTH ({keys.DEPTH}): not one of {', '.join(map(str, _DEPTHS))}."
        )
    # Detectron2 replaces norms where it freezes, so that it freezes after the norms are set
    stock = {"MODEL.RESNETS.NORM": "", "MODEL.BACKBONE.FREEZE_AT": 0}
    resnet = build_resnet_backbone(changed_config(cfg, stock), input_shape)

    set_norms(resnet, norm, whiten_norm, keys.WHITEN_POSITIONS)
    resnet.freeze(cfg.MODEL.BACKBONE.FREEZE_AT)
    convert_convs(resnet, keys.CONV, where="MODEL.RESNETS.CONV")
    return resnet
