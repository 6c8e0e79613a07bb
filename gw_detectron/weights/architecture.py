"""ResNet architectures, and their module names in torchvision and Detectron2."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from ..errors import WeightsError, summarize_names
from ..modeling import add_pool_norm
from ..modeling.resnet import NUM_BLOCKS_PER_STAGE
from ..norms import build_norm
from ..norms.positions import norms_at

_STAGES = {"layer1": "res2", "layer2": "res3", "layer3": "res4", "layer4": "res5"}  # torchvision -> Detectron2
_FIRST_NAMES = {"conv1": "stem.conv1", "bn1": "stem.conv1.norm", "fc": "linear", **_STAGES}
_DEPTHS = ", ".join(map(str, sorted(NUM_BLOCKS_PER_STAGE)))
_ALLOWED = f"unknown. Fix: give a ResNet such as R-50 ({_DEPTHS}), or a ResNeXt such as X-50-32x4d (50, 101, 152)."
_FIRST_BLOCK = re.compile(r"(?P<prefix>(?:.*\.)?)(?:(?P<torchvision>layer1)|(?P<detectron2>res2))\.0\.")
_CAFFE2 = "res2_0_branch2a_w"  # in the files of Detectron2's model zoo, such as MSRA/R-50.pkl
_RESNET_D = re.compile(r"conv1\.\d|layer\d\.0\.downsample\.2\.")  # timm's names
#: what stands before the names that all detectors with a ResNet share
DETECTOR_PREFIX = re.compile(r"^.*?\b(?=stem\.|res[2-5]\.\d)")
_KINDS = {nn.Conv2d: "conv", nn.BatchNorm2d: "norm", nn.Linear: "linear"}


class LayerNames(NamedTuple):
    """Names of one ResNet layer that has weights.

    Args:
        torchvision: such as ``layer1.0.bn2``; the authors' checkpoints and timm have the same names.
        detectron2: such as ``res2.0.conv2.norm``.
        kind: ``conv``, ``norm`` or ``linear``.
        channels: channels of its output.
    """

    torchvision: str
    detectron2: str
    kind: str
    channels: int = 0


#: a norm between the last average pooling and the classifier
POOL_NORM = LayerNames("last_bn", "avgpool.norm", "norm")


@dataclass(frozen=True)
class Architecture:
    """ResNet or ResNeXt architecture.

    Args:
        depth: 18, 34, 50, 101 or 152.
        groups: of the 3x3 convolutions, 1 for a ResNet.
        width: channels of each group in the first stage, 64 for a ResNet.

    Raises:
        WeightsError: there is no such network.
    """

    depth: int
    groups: int = 1
    width: int = 64

    def __post_init__(self) -> None:
        if self.depth not in NUM_BLOCKS_PER_STAGE or not (self.bottleneck or self.name == f"R-{self.depth}"):
            raise WeightsError(f"architecture ({self.name!r}): {_ALLOWED}")

    @classmethod
    def parse(cls, name: str) -> "Architecture":
        """Parse a name such as ``R-50`` or ``X-101-32x8d``.

        Raises:
            WeightsError: there is no such network.
        """
        match = re.fullmatch(r"R-(\d+)|X-(\d+)-(\d+)x(\d+)d", name)
        if not match:
            raise WeightsError(f"architecture ({name!r}): {_ALLOWED}")
        return cls(*(int(number) for number in match.groups() if number))

    @property
    def name(self) -> str:
        if (self.groups, self.width) == (1, 64):
            return f"R-{self.depth}"
        return f"X-{self.depth}-{self.groups}x{self.width}d"

    @property
    def bottleneck(self) -> bool:
        return self.depth >= 50

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks in each stage."""
        return NUM_BLOCKS_PER_STAGE[self.depth]

    @property
    def res2_channels(self) -> int:
        """Output channels of the first stage."""
        return 256 if self.bottleneck else 64

    def modules(self) -> tuple[LayerNames, ...]:
        """List the layers that have weights, in torchvision's order."""
        return _modules(self)

    def norm_layers(self) -> list[LayerNames]:
        """List the norm layers in torchvision's order."""
        return [module for module in self.modules() if module.kind == "norm"]


@functools.cache
def _modules(network: Architecture) -> tuple[LayerNames, ...]:
    modules = build_torchvision(network, Norms(), num_classes=1).named_modules()
    return tuple(
        LayerNames(name, detectron2_name(name), _KINDS[type(layer)], len(layer.weight))
        for name, layer in modules
        if type(layer) in _KINDS
    )


class Norms(NamedTuple):
    """Norm names of a network.

    Args:
        norm: the norm of all layers that are not at ``positions``.
        whiten_norm: the norm at ``positions``.
        positions: one of ``"" S1 S1-B1 S1-B2 S1-B3 S1-B12 ALL``.
    """

    norm: str = "BN"
    whiten_norm: str = ""
    positions: str = ""

    def __str__(self) -> str:
        whitened = f"{self.whiten_norm} at {self.positions}"
        return whitened if self.positions == "ALL" else f"{self.norm}, {whitened if self.positions else 'no GW'}"

    def by_layer(self, network: Architecture) -> dict[LayerNames, str]:
        """Return the norm name of each norm layer.

        Raises:
            ValueError: unknown positions, or positions that the network does not have.
        """
        whitened = norm_layers_at(network, self.positions)
        return {layer: self.whiten_norm if layer in whitened else self.norm for layer in network.norm_layers()}


def build_torchvision(
    network: Architecture, norms: Norms, pool_norm: str = "", num_classes: int | None = None
) -> ResNet:
    """Build torchvision's ResNet with the norms, on the meta device.

    Args:
        network: the architecture.
        norms: the norm names.
        pool_norm: the norm before the classifier, as ``avgpool.norm``; "" for none.
        num_classes: of the classifier; None for no classifier.

    Raises:
        ValueError: a norm does not fit.
    """
    with torch.device("meta"):
        model = ResNet(
            Bottleneck if network.bottleneck else BasicBlock,
            list(network.blocks),
            num_classes=num_classes or 1,
            groups=network.groups,
            width_per_group=network.width,
        )
        if norms != Norms():  # torchvision's own
            for layer, spec in norms.by_layer(network).items():
                norm = build_norm(spec, layer.channels, where=layer.torchvision)
                model.set_submodule(layer.torchvision, norm or nn.Identity())
        if pool_norm:
            add_pool_norm(model, pool_norm, model.fc.in_features)
    if num_classes is None:
        model.fc = nn.Identity()
    return model


def detectron2_name(name: str) -> str:
    """Translate torchvision's name of a ResNet module or tensor to Detectron2's.

    Source: Detectron2, tools/convert-torchvision-to-d2.py.
    """
    first, dot, rest = name.partition(".")
    rest = re.sub(r"\bbn(\d)", r"conv\1.norm", rest)
    rest = rest.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    return _FIRST_NAMES.get(first, first) + dot + rest


def infer_architecture(tensors: Mapping[str, Tensor], layout: str = "torchvision") -> Architecture:
    """Infer the architecture from the names of blocks and a grouped convolution.

    Args:
        tensors: a state dict.
        layout: whose names these are, ``torchvision`` or ``detectron2``.

    Raises:
        WeightsError: these are not the weights of a ResNet or ResNeXt.
    """
    stages = list(_STAGES if layout == "torchvision" else _STAGES.values())
    blocks = {tuple(name.split(".")[:2]) for name in tensors}
    counts = tuple(sum(block[0] == stage for block in blocks) for stage in stages)
    bottleneck = f"{stages[0]}.0.conv3.weight" in tensors
    depths = [d for d, known in NUM_BLOCKS_PER_STAGE.items() if known == counts and (d >= 50) == bottleneck]
    if not depths:
        raise WeightsError(
            f"tensors ({summarize_names(tensors)}): not the weights of a known ResNet: {counts} blocks "
            f"{'with' if bottleneck else 'without'} bottlenecks in {layout}'s {', '.join(stages)}. Fix: "
            f"{_other_names(tensors, layout) or f'give weights of a ResNet with {_DEPTHS} layers'}."
        )
    if variant := [name for name in tensors if _RESNET_D.match(name)]:
        raise WeightsError(
            f"tensors ({summarize_names(variant)}): of a ResNet with a stem of three convolutions or pooled shortcuts "
            "(ResNet-D), which Detectron2 does not have. Fix: give weights of a plain ResNet or ResNeXt."
        )
    if not bottleneck:
        return Architecture(depths[0])
    name = f"{stages[0]}.0.conv2.weight"
    shape = tuple(tensors[name].shape) if name in tensors else ()
    if len(shape) != 4 or 0 in shape or shape[0] % shape[1]:
        raise WeightsError(
            f"{name} ({shape or 'missing'}): does not show the number of groups. Fix: give complete weights."
        )
    return Architecture(depths[0], groups=shape[0] // shape[1], width=shape[1])


def _other_names(tensors: Mapping[str, Tensor], layout: str) -> str:
    """Return what to do with names of Caffe2 or the other layout, or with a prefix, "" with any others."""
    if _CAFFE2 in tensors:
        return "set MODEL.WEIGHTS to the file itself: these are Caffe2's names, which Detectron2 reads"
    found = next((match for name in tensors if (match := _FIRST_BLOCK.match(name))), None)
    if found is None:
        return ""
    prefix, own = found["prefix"], "torchvision" if found["torchvision"] else "detectron2"
    if prefix and own == "detectron2" and layout == "torchvision":
        return (
            "set MODEL.WEIGHTS to the file itself: this is a checkpoint of Detectron2, and only ImageNet weights are "
            "converted"
        )
    steps = [f"remove the prefix {prefix!r} of the names, and leave out other tensors"] if prefix else []
    if own != layout and layout == "torchvision":
        steps.append("these are Detectron2's names: they need no conversion, or translate them by to_torchvision")
    elif own != layout:
        steps.append("these are torchvision's names: convert them first")
    return "; ".join(steps)


def norm_layers_at(network: Architecture, positions: str) -> list[LayerNames]:
    """List the norms at the named positions.

    Raises:
        ValueError: unknown positions, or positions that the network does not have.
    """
    layers = network.norm_layers()
    chosen = norms_at(positions, [layer.detectron2 for layer in layers])
    return [layer for layer in layers if layer.detectron2 in chosen]
