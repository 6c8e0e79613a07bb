"""ResNet and ResNeXt backbones with another norm at chosen positions, see :mod:`gw_detectron.norms.positions`."""

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
from ..norms import Norm, convert_convs, resolve_norm, whitened_convs
from .convs import append_fusible_relu, use_torchvision_operator

NUM_BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STAGES = ("stem", "res2", "res3", "res4", "res5")


class _WhitenedBlock(CNNBlockBase):
    """Mixin for a stock stem or block: another norm at chosen convolutions, and fused ReLUs.

    ``freeze()`` also freezes batch whitening.

    Args:
        args, kwargs: as of the stock block; its ``norm`` is an argument of Detectron2's ``get_norm``.
        whiten_norm: another such argument.
        whiten_convs: names of the convolutions before ``whiten_norm``.
    """

    relu_convs: tuple[str, ...] = ()  # convolutions with a ReLU after their norm

    def __init__(self, *args: Any, whiten_norm: Norm = "", whiten_convs: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.relu_convs:
            append_fusible_relu(getattr(self, name))
        # Set the norms here, not in the built network: the constructor of ResNet freezes its blocks.
        for name in whiten_convs:
            conv = getattr(self, name)
            if conv is not None:  # an identity shortcut has no convolution
                conv.norm = get_norm(whiten_norm, conv.out_channels)

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
        return F.max_pool2d(_conv_relu(self.conv1, x), kernel_size=3, stride=2, padding=1)


class GWBasicBlock(_WhitenedBlock, BasicBlock):
    """Block of ResNet-18 and -34 with another norm at chosen convolutions."""

    relu_convs = ("conv1",)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(_conv_relu(self.conv1, x))
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)


class GWBottleneckBlock(_WhitenedBlock, BottleneckBlock):
    """Bottleneck block of ResNeXt and deeper ResNets with another norm at chosen convolutions."""

    relu_convs = ("conv1", "conv2")

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv3(_conv_relu(self.conv2, _conv_relu(self.conv1, x)))
        out += x if self.shortcut is None else self.shortcut(x)
        return F.relu_(out)


class GWDeformBottleneckBlock(_WhitenedBlock, DeformBottleneckBlock):
    """Bottleneck block with a deformable convolution and another norm at chosen convolutions.

    It trains on the CPU as well. Its ReLUs are not fused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_torchvision_operator(self.conv2)


def gw_resnet(
    depth: int = 50,
    positions: str = "S1-B2",
    norm: Norm = "FrozenBN",
    whiten_norm: Norm = "GW",
    *,
    in_channels: int = 3,
    stem_out_channels: int = 64,
    res2_out_channels: int | None = None,
    num_groups: int = 1,
    width_per_group: int = 64,
    stride_in_1x1: bool = False,
    res5_dilation: int = 1,
    deform_on_per_stage: Sequence[bool] = (False,) * 4,
    deform_modulated: bool = False,
    deform_num_groups: int = 1,
    out_features: Sequence[str] = ("res2", "res3", "res4", "res5"),
    freeze_at: int = 2,
    conv: str = "",
) -> ResNet:
    """Build a ResNet or ResNeXt with another norm at the paper's positions.

    Args:
        depth: 18, 34, 50, 101 or 152.
        positions: see :func:`gw_detectron.norms.whitened_convs`.
        norm: norm name, or an argument of Detectron2's ``get_norm``, at all other positions.
        whiten_norm: the same for ``positions``.
        in_channels: channels of the image.
        stem_out_channels: channels of the stem's output.
        res2_out_channels: channels of the first stage's output, 64 for the depths 18 and 34 and else 256 by default;
            each later stage has twice as many.
        num_groups: groups of the 3x3 convolutions: 1 in a ResNet, 32 in a ResNeXt.
        width_per_group: channels of each of these groups in the first stage.
        stride_in_1x1: downsample in the first 1x1 convolution, as Detectron2's MSRA weights do. The weights of the
            authors, torchvision and timm downsample in the 3x3 convolution.
        res5_dilation: 2 keeps the resolution of res4.
        deform_on_per_stage: deformable 3x3 convolutions in res2 to res5.
        deform_modulated: the second version of deformable convolution.
        deform_num_groups: its groups of offsets.
        out_features: names of the returned feature maps.
        freeze_at: freeze the first stages, the stem being 1; 0 freezes none.
        conv: "WS" standardizes the weights of all convolutions, see :func:`gw_detectron.convert_convs`.

    Returns:
        Detectron2's ``ResNet``.

    Raises:
        ConfigError: an argument is out of its range, or a norm does not fit.

    Source: Group Whitening, section 5.1.
    """
    norm = resolve_norm(norm, where="gw_resnet, norm")
    whiten_norm = resolve_norm(whiten_norm, where="gw_resnet, whiten_norm")
    _check("depth", depth, sorted(NUM_BLOCKS_PER_STAGE))
    bottleneck = depth >= 50
    if res2_out_channels is None:
        res2_out_channels = 256 if bottleneck else 64
    _check("res5_dilation", res5_dilation, [1, 2])
    if not bottleneck:
        _check("res2_out_channels", res2_out_channels, [64], f" by ResNet-{depth}")
        _check("num_groups", num_groups, [1], f" by ResNet-{depth}")
        _check("res5_dilation", res5_dilation, [1], f" by ResNet-{depth}")
        _check("deform_on_per_stage", any(deform_on_per_stage), [False], f" by ResNet-{depth}")
    convs = whitened_convs(positions, bottleneck=bottleneck, where="WHITEN_POSITIONS")

    stem = GWBasicStem(in_channels, stem_out_channels, whiten_norm if positions else norm)
    stages = []
    before, channels, width = stem_out_channels, res2_out_channels, num_groups * width_per_group
    for index, num_blocks in enumerate(NUM_BLOCKS_PER_STAGE[depth]):
        dilation = res5_dilation if index == 3 else 1
        first_stride = 1 if index == 0 or dilation == 2 else 2
        block_class: type[nn.Module] = GWBasicBlock
        options: dict[str, Any] = {}
        if bottleneck:
            block_class = GWBottleneckBlock
            options = {
                "bottleneck_channels": width * 2**index,
                "stride_in_1x1": stride_in_1x1,
                "dilation": dilation,
                "num_groups": num_groups,
            }
            if deform_on_per_stage[index]:
                block_class = GWDeformBottleneckBlock
                options |= {"deform_modulated": deform_modulated, "deform_num_groups": deform_num_groups}
        stages.append(
            ResNet.make_stage(
                block_class,
                num_blocks,
                stride_per_block=[first_stride] + [1] * (num_blocks - 1),
                in_channels=before,
                out_channels=channels,
                norm=norm,
                whiten_norm=whiten_norm,
                whiten_convs=convs,
                **options,
            )
        )
        before, channels = channels, channels * 2
    resnet = ResNet(stem, stages, out_features=list(out_features), freeze_at=freeze_at)
    convert_convs(resnet, conv, where="MODEL.RESNETS.CONV")
    return resnet


def _check(argument: str, value: Any, allowed: list[Any], by: str = "") -> None:
    if value not in allowed:
        fix = f"use one of {allowed}" if len(allowed) > 1 else f"set it to {allowed[0]}"
        raise ConfigError(f"MODEL.RESNETS.{argument.upper()} ({value!r}): not supported{by}. Fix: {fix}.")


@BACKBONE_REGISTRY.register()
def build_gw_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Build a ResNet or ResNeXt with ``WHITEN_NORM`` at ``WHITEN_POSITIONS``.

    All other norms are ``MODEL.RESNETS.NORM``. All other keys of ``MODEL.RESNETS`` and ``MODEL.BACKBONE.FREEZE_AT``
    have the meaning that Detectron2's ``build_resnet_backbone`` gives them.
    """
    resnets = cfg.MODEL.RESNETS
    return gw_resnet(
        resnets.DEPTH,
        resnets.WHITEN_POSITIONS,
        resolve_norm(resnets.NORM, where="MODEL.RESNETS.NORM"),
        resolve_norm(resnets.WHITEN_NORM, where="MODEL.RESNETS.WHITEN_NORM"),
        in_channels=input_shape.channels,
        stem_out_channels=resnets.STEM_OUT_CHANNELS,
        res2_out_channels=resnets.RES2_OUT_CHANNELS,
        num_groups=resnets.NUM_GROUPS,
        width_per_group=resnets.WIDTH_PER_GROUP,
        stride_in_1x1=resnets.STRIDE_IN_1X1,
        res5_dilation=resnets.RES5_DILATION,
        deform_on_per_stage=resnets.DEFORM_ON_PER_STAGE,
        deform_modulated=resnets.DEFORM_MODULATED,
        deform_num_groups=resnets.DEFORM_NUM_GROUPS,
        out_features=resnets.OUT_FEATURES,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
        conv=resnets.CONV,
    )
