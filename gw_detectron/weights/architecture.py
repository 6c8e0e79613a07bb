"""ResNet architectures, and their module names in torchvision and Detectron2."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from ..errors import WeightsError, summarize_names
from ..modeling.resnet import NUM_BLOCKS_PER_STAGE
from ..norms import build_norm

_STAGES = {f"layer{index}": f"res{index + 1}" for index in range(1, 5)}  # torchvision -> Detectron2
_DETECTRON2_NAME = re.compile(
    r"(?P<stem>stem\.)?(?:res(?P<stage>[2-5])\.(?P<block>\d+)\.)?(?:conv(?P<conv>\d)|shortcut)(?P<norm>\.norm)?\.(?P<field>.+)"
)
_DEPTHS = ", ".join(map(str, sorted(NUM_BLOCKS_PER_STAGE)))
_ALLOWED = f"unknown. Fix: give a ResNet such as R-50 ({_DEPTHS}), or a ResNeXt such as X-50-32x4d (50, 101, 152)."
_DETECTOR = re.compile(r"res2_0_branch2a_w|.*\.res2\.0\.conv1\.weight")  # Caffe2's names, or a detector's


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
        match = re.fullmatch(r"R-(\d{1,4})|X-(\d{1,4})-(\d{1,4})x(\d{1,4})d", name)
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

    @functools.cached_property
    def norm_layers(self) -> Mapping[str, int]:
        """The channels of each norm layer, by torchvision's names and in its order."""
        modules = build_torchvision(self).named_modules()
        return {name: layer.num_features for name, layer in modules if isinstance(layer, nn.BatchNorm2d)}


def build_torchvision(network: Architecture, norms: Mapping[str, str] | None = None) -> ResNet:
    """Build torchvision's ResNet without a classifier, on the meta device.

    Args:
        network: the architecture.
        norms: norm name of each norm layer, by torchvision's names; None for BN.

    Raises:
        ValueError: a norm does not fit.
    """
    with torch.device("meta"):
        block = Bottleneck if network.bottleneck else BasicBlock
        model = ResNet(
            block,
            list(NUM_BLOCKS_PER_STAGE[network.depth]),
            num_classes=1,
            groups=network.groups,
            width_per_group=network.width,
        )
        model.fc = nn.Identity()
        for layer, spec in (norms or {}).items():
            norm = build_norm(spec, network.norm_layers[layer], where=layer)
            model.set_submodule(layer, norm or nn.Identity())
    return model


def detectron2_name(name: str) -> str:
    """Translate torchvision's name of a ResNet module or tensor to Detectron2's.

    Source: Detectron2, tools/convert-torchvision-to-d2.py.
    """
    name = re.sub(r"\bbn(\d)", r"conv\1.norm", name)
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    first, dot, rest = name.partition(".")
    return _STAGES[first] + dot + rest if first in _STAGES else f"stem.{name}"


def to_torchvision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Detectron2 ResNet tensors to torchvision's names; the classifier is left out.

    Args:
        tensors: the state dict of a Detectron2 ResNet, e.g. of ``backbone.bottom_up`` in a detector with FPN.

    Raises:
        WeightsError: these are not the tensors of a ResNet or ResNeXt.
    """
    renamed, unexpected = {}, []
    for name, value in tensors.items():
        match = _DETECTRON2_NAME.fullmatch(name)
        if match and bool(match["stem"]) != bool(match["stage"]):
            layer = f"conv{match['conv']}" if match["conv"] else "downsample.0"
            if match["norm"]:
                layer = f"bn{match['conv']}" if match["conv"] else "downsample.1"
            block = f"layer{int(match['stage']) - 1}.{match['block']}." if match["stage"] else ""
            renamed[f"{block}{layer}.{match['field']}"] = value
        elif not name.startswith("linear."):
            unexpected.append(name)
    if unexpected:
        raise WeightsError(f"tensors ({summarize_names(unexpected)}): not part of a ResNet. Fix: leave them out.")
    infer_architecture(renamed)
    return renamed


def infer_architecture(tensors: Mapping[str, Tensor]) -> Architecture:
    """Infer the architecture from the names of blocks and a grouped convolution.

    Args:
        tensors: a state dict with torchvision's names.

    Raises:
        WeightsError: these are not the weights of a ResNet or ResNeXt.
    """
    blocks = {tuple(name.split(".")[:2]) for name in tensors}
    counts = tuple(sum(block[0] == stage for block in blocks) for stage in _STAGES)
    bottleneck = "layer1.0.conv3.weight" in tensors
    depths = [d for d, known in NUM_BLOCKS_PER_STAGE.items() if known == counts and (d >= 50) == bottleneck]
    if not depths:
        fix = f"give weights of a ResNet with {_DEPTHS} layers, in torchvision's or Detectron2's names"
        if any(map(_DETECTOR.fullmatch, tensors)):
            fix = "set MODEL.WEIGHTS to the file itself, which Detectron2 reads: only ImageNet weights are converted"
        raise WeightsError(
            f"tensors ({summarize_names(tensors)}): not the weights of a known ResNet: {counts} blocks "
            f"{'with' if bottleneck else 'without'} bottlenecks in {', '.join(_STAGES)}. Fix: {fix}."
        )
    if not bottleneck:
        return Architecture(depths[0])
    name = "layer1.0.conv2.weight"
    shape = tuple(tensors[name].shape) if name in tensors else ()
    if len(shape) != 4 or 0 in shape or shape[0] % shape[1]:
        raise WeightsError(
            f"{name} ({shape or 'missing'}): does not show the number of groups. Fix: give complete weights."
        )
    return Architecture(depths[0], groups=shape[0] // shape[1], width=shape[1])
