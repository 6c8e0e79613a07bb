"""ResNet and ResNeXt backbones with another norm at chosen positions, see :mod:`gw_detectron.norms.positions`."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, ResNet
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock, DeformBottleneckBlock
from torch import Tensor, nn

from ..config import get_value
from ..errors import ConfigError
from ..layers import FrozenBatchWhitening2d
from ..norms import Norm, convert_convs, resolve_norm, whitened_convs
from .conv_norm_relu import append_fusible_relu
from .deform_conv import use_torchvision_operator

NUM_BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STAGES = ("stem", "res2", "res3", "res4", "res5")


class _Component(CNNBlockBase):
    """Mixin for a stock stem or block: any norm name, and fused ReLUs.

    ``freeze()`` also freezes batch whitening. A convolution that replaces one of ``relu_convs`` and has no activation
    gets its ReLU in ``forward``, as in a stock block; TorchScript cannot pass it to a function that all would share.
    """

    relu_convs: tuple[str, ...] = ()  # convolutions with a ReLU after their norm

    def __init__(self, *args: Any, norm: Norm = "BN", **kwargs: Any) -> None:
        super().__init__(*args, norm=resolve_norm(norm, where=f"{type(self).__name__}, norm"), **kwargs)
        for name in self.relu_convs:
            append_fusible_relu(getattr(self, name))

    def freeze(self) -> nn.Module:
        super().freeze()
        return FrozenBatchWhitening2d.convert(self)


class GWBasicStem(_Component, BasicStem):
    """Stem of ResNet with any norm; Group Whitening and the ReLU are fused.

    Args:
        in_channels: channels of the image.
        out_channels: channels of the output.
        norm: a norm name or an argument of Detectron2's ``get_norm``.

    Raises:
        NormError: the norm is unknown or does not fit.
    """

    relu_convs = ("conv1",)

    def __init__(self, in_channels: int = 3, out_channels: int = 64, norm: Norm = "BN") -> None:
        super().__init__(in_channels=in_channels, out_channels=out_channels, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        if getattr(self.conv1, "activation", None) is None:
            out = F.relu_(out)
        return F.max_pool2d(out, kernel_size=3, stride=2, padding=1)


class _WhitenedBlock(_Component):
    """Mixin for a stock block: another norm at chosen convolutions as well.

    Args:
        args, kwargs: those of the stock block; ``norm`` may be any norm name.
        whiten_norm: a norm name or an argument of Detectron2's ``get_norm``.
        whiten_convs: names of the convolutions that get ``whiten_norm``.

    Raises:
        NormError: a norm is unknown or does not fit.
    """

    def __init__(self, *args: Any, whiten_norm: Norm = "", whiten_convs: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        whiten_norm = resolve_norm(whiten_norm, where=f"{type(self).__name__}, whiten_norm")
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
        out = self.conv1(x)
        if getattr(self.conv1, "activation", None) is None:
            out = F.relu_(out)
        return _add_shortcut(self.conv2(out), x if self.shortcut is None else self.shortcut(x))


class GWBottleneckBlock(_WhitenedBlock, BottleneckBlock):
    """Bottleneck block with another norm at chosen convolutions.

    ResNeXt and ResNets from 50 layers up consist of it.

    Args: those of Detectron2's ``BottleneckBlock``, ``whiten_norm`` and ``whiten_convs``.
    """

    relu_convs = ("conv1", "conv2")

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(x)
        if getattr(self.conv1, "activation", None) is None:
            out = F.relu_(out)
        out = self.conv2(out)
        if getattr(self.conv2, "activation", None) is None:
            out = F.relu_(out)
        return _add_shortcut(self.conv3(out), x if self.shortcut is None else self.shortcut(x))


def _add_shortcut(out: Tensor, shortcut: Tensor) -> Tensor:
    out += shortcut
    return F.relu_(out)


class GWDeformBottleneckBlock(_WhitenedBlock, DeformBottleneckBlock):
    """Bottleneck block with a deformable convolution and another norm at chosen convolutions.

    It trains on the CPU as well. Its ReLUs are not fused. Args: those of Detectron2's ``DeformBottleneckBlock``,
    ``whiten_norm``, ``whiten_convs``.
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
    where: Callable[[str], str] = "gw_resnet, {}".format,
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
        where: names an argument in error messages.

    Returns:
        Detectron2's ``ResNet``.

    Raises:
        ConfigError: an argument is out of its range, or a norm does not fit.

    Source: Group Whitening, section 5.1.
    """
    _check_value(where("depth"), depth, sorted(NUM_BLOCKS_PER_STAGE))
    _check_items(where("out_features"), out_features, STAGES)
    _check_items(where("deform_on_per_stage"), deform_on_per_stage, (False, True), count=4)
    if not isinstance(freeze_at, int):
        raise ConfigError(f"{where('freeze_at')} ({freeze_at!r}): not an integer. Fix: give 0 to 5.")
    bottleneck = depth >= 50
    if res2_out_channels is None:
        res2_out_channels = 256 if bottleneck else 64
    _check_value(where("res5_dilation"), res5_dilation, [1, 2])
    if not bottleneck:
        by = f" by ResNet-{depth}"
        _check_value(where("res2_out_channels"), res2_out_channels, [64], by)
        _check_value(where("num_groups"), num_groups, [1], by)
        _check_value(where("res5_dilation"), res5_dilation, [1], by)
        _check_value(where("deform_on_per_stage"), list(deform_on_per_stage), [[False] * 4], by)
    convs = whitened_convs(positions, bottleneck=bottleneck, where=where("positions"))
    out_channels = [res2_out_channels * 2**stage for stage in range(4)]
    bottleneck_channels = [num_groups * width_per_group * 2**stage for stage in range(4)]
    inner_channels = bottleneck_channels if bottleneck else out_channels
    channels = [stem_out_channels, *out_channels, *inner_channels]
    norm = resolve_norm(norm, where=where("norm"), channels=channels)
    if positions:
        whiten_channels = [stem_out_channels]
        for name in convs:
            whiten_channels += inner_channels if name in ("conv1", "conv2") else out_channels
        whiten_norm = resolve_norm(whiten_norm, where=where("whiten_norm"), channels=whiten_channels)

    stem = GWBasicStem(in_channels, stem_out_channels, whiten_norm if positions else norm)
    stages = []
    for index, num_blocks in enumerate(NUM_BLOCKS_PER_STAGE[depth]):
        dilation = res5_dilation if index == 3 else 1
        first_stride = 1 if index == 0 or dilation == 2 else 2
        arguments: dict[str, Any] = {
            "stride_per_block": [first_stride] + [1] * (num_blocks - 1),
            "in_channels": out_channels[index - 1] if index else stem_out_channels,
            "out_channels": out_channels[index],
            "norm": norm,
            "whiten_norm": whiten_norm if convs else "",
            "whiten_convs": convs,
        }
        block_class: type[nn.Module] = GWBasicBlock
        if bottleneck:
            block_class = GWBottleneckBlock
            arguments |= {
                "bottleneck_channels": bottleneck_channels[index],
                "stride_in_1x1": stride_in_1x1,
                "dilation": dilation,
                "num_groups": num_groups,
            }
            if deform_on_per_stage[index]:
                block_class = GWDeformBottleneckBlock
                arguments |= {"deform_modulated": deform_modulated, "deform_num_groups": deform_num_groups}
        stages.append(ResNet.make_stage(block_class, num_blocks, **arguments))
    resnet = ResNet(stem, stages, out_features=list(out_features), freeze_at=freeze_at)
    convert_convs(resnet, conv, where=where("conv"))
    return resnet


def _check_value(name: str, value: Any, allowed: list[Any], by: str = "") -> None:
    if value not in allowed:
        fix = f"use one of {allowed}" if len(allowed) > 1 else f"set it to {allowed[0]}"
        raise ConfigError(f"{name} ({value!r}): not supported{by}. Fix: {fix}.")


def _check_items(name: str, values: Any, allowed: tuple[Any, ...], count: int | None = None) -> None:
    """Require a sequence of allowed items, ``count`` of them or at least one."""
    fits = isinstance(values, Sequence) and not isinstance(values, str)
    if not (fits and len(values) and count in (None, len(values)) and all(value in allowed for value in values)):
        fix = f"give a list of {count or 'some'} of {list(allowed)}"
        raise ConfigError(f"{name} ({values!r}): not supported. Fix: {fix}.")


#: arguments of gw_resnet that the config has under another name than ``MODEL.RESNETS.<argument>``
_KEYS = {"positions": "MODEL.RESNETS.WHITEN_POSITIONS", "freeze_at": "MODEL.BACKBONE.FREEZE_AT"}


def _key(argument: str) -> str:
    return _KEYS.get(argument, f"MODEL.RESNETS.{argument.upper()}")


@BACKBONE_REGISTRY.register()
def build_gw_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ResNet:
    """Build a ResNet or ResNeXt with ``WHITEN_NORM`` at ``WHITEN_POSITIONS``.

    All other norms are ``MODEL.RESNETS.NORM``. All other keys of ``MODEL.RESNETS`` and ``MODEL.BACKBONE.FREEZE_AT``
    have the meaning that Detectron2's ``build_resnet_backbone`` gives them.

    Raises:
        ConfigError: a key of ``MODEL.RESNETS`` is out of its range, or a norm does not fit.
    """
    arguments = set(inspect.signature(gw_resnet).parameters) - {"in_channels", "where"}
    values = {argument: get_value(cfg, _key(argument)) for argument in arguments}
    return gw_resnet(**values, in_channels=input_shape.channels, where=_key)


def add_pool_norm(classifier: nn.Module, norm: Norm, channels: int) -> None:
    """Put a norm between average pooling and classifier, to learn decorrelated features.

    Args:
        classifier: Detectron2's or torchvision's ResNet, whose pooling is ``avgpool``. The norm becomes its
            ``avgpool.norm``.
        norm: a norm name, or the result of :func:`resolve_norm`.
        channels: channels of the last feature map.

    Raises:
        ConfigError: the norm is unknown or does not fit, or the network has no ``avgpool``.

    Source: Group Whitening, section 5.1.1; supplement, section 6.1.
    """
    if not isinstance(getattr(classifier, "avgpool", None), nn.Module):
        kind = type(classifier).__name__
        raise ConfigError(f"add_pool_norm ({kind}): has no avgpool. Fix: give a classifier, a ResNet with num_classes.")
    norm = resolve_norm(norm, where="add_pool_norm", channels=[channels])
    layers = {"pool": classifier.avgpool, "norm": get_norm(norm, channels)}
    classifier.avgpool = nn.Sequential(OrderedDict(layers))
