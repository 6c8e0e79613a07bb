"""The network of ImageNet weights: architecture, names in torchvision and Detectron2, norms.

Norms are recorded in the file, proven by the tensors, or stated by the user. Conversion never guesses: options such as
the number of groups leave no trace in the tensors.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from ..errors import UnknownNormError, WeightsError, summarize_names
from ..norms import POSITIONS, build_norm, evaluation_spec, norm_spec, norms_at
from .record import Record

NUM_BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_STAGES = {f"layer{index}": f"res{index + 1}" for index in range(1, 5)}  # torchvision -> Detectron2
_DETECTRON2_NAME = re.compile(
    r"(?P<stem>stem\.)?(?:res(?P<stage>[2-5])\.(?P<block>\d+)\.)?(?:conv(?P<conv>\d)|shortcut)(?P<norm>\.norm)?\.(?P<field>.+)"
)
_DEPTHS = ", ".join(map(str, sorted(NUM_BLOCKS_PER_STAGE)))
_BN = "BN:"  # evaluation_spec of batch normalization, frozen or not
_DETECTOR = re.compile(r"res2_0_branch2a_w|.*\.res2\.0\.conv1\.weight")  # Caffe2's names, or a detector's


@dataclass(frozen=True)
class Architecture:
    """ResNet or ResNeXt architecture."""

    depth: int
    groups: int = 1  # of the 3x3 convolutions
    width: int = 64  # channels of each group in the first stage

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
    """Build torchvision's ResNet without a classifier, with norm names by its layers, on the meta device."""
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
    """Infer the architecture from the blocks and a grouped convolution of torchvision's tensors."""
    blocks = {tuple(name.split(".")[:2]) for name in tensors}
    counts = tuple(sum(block[0] == stage for block in blocks) for stage in _STAGES)
    bottleneck = "layer1.0.conv3.weight" in tensors
    depths = [d for d, known in NUM_BLOCKS_PER_STAGE.items() if known == counts and (d >= 50) == bottleneck]
    if not depths:
        fix = f"give weights of a ResNet with {_DEPTHS} layers, in torchvision's or Detectron2's names without a prefix"
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


class Positions(NamedTuple):
    """The norms of a network as config keys: one at ``positions``, one everywhere else."""

    norm: str
    whiten_norm: str
    positions: str

    def __str__(self) -> str:
        if self.positions == "ALL":
            return f"{self.whiten_norm} at ALL"
        return f"{self.norm}, {self.whiten_norm} at {self.positions}" if self.positions else self.norm


def infer_norms(
    network: Architecture, tensors: Mapping[str, Tensor], record: Record, stated: str | None
) -> dict[str, str]:
    """Find the full norm name of each of torchvision's layers; require that record and statement agree.

    ``stated`` is the user's norm name for all layers without BN's statistics.
    """
    layers = network.norm_layers
    unproven = [layer for layer in layers if not _has_batch_statistics(tensors, layer)]
    if (recorded := record.norms) is not None:
        norms = {layer: recorded.get(layer) or recorded.get(detectron2_name(layer), "") for layer in layers}
        norms |= {layer: "BN" for layer, spec in norms.items() if not spec and layer not in unproven}
        if missing := [layer for layer, spec in norms.items() if not spec]:
            raise WeightsError(f"norms: the file lists none for {summarize_names(missing)}. Fix: write it again.")
    elif unproven and stated is None:
        raise UnknownNormError(
            f"Cannot tell GN from GW for {len(unproven)} of {len(layers)} norm layers ({summarize_names(unproven)}): "
            "their tensors look the same, and show no options. Fix: pass --norm GW (the paper's setting), --norm GN or "
            "another norm name (in Python, norm=)."
        )
    else:
        norms = {layer: (stated or "") if layer in unproven else "BN" for layer in layers}
    norms = {layer: full_name(spec, layers[layer]) for layer, spec in norms.items()}
    if stated is not None:
        others = [layer for layer, spec in norms.items() if evaluation_spec(spec) != _BN] or list(norms)
        for layer in others:
            if not is_same_norm(full_name(stated, layers[layer]), norms[layer], with_eps="eps=" in stated):
                raise WeightsError(
                    f"norm ({stated!r}): the weights have {norms[layer]} at {layer}. Fix: give that norm, or none."
                )
    return norms


def _has_batch_statistics(tensors: Mapping[str, Tensor], layer: str) -> bool:
    """Return whether the tensors of a layer prove batch normalization."""
    fields = {name.removeprefix(f"{layer}.") for name in tensors if name.startswith(f"{layer}.")}
    statistics = {"running_mean", "running_var"}
    return bool(fields & statistics) and fields <= statistics | {"weight", "bias", "num_batches_tracked"}


@functools.cache
def full_name(spec: str, channels: int) -> str:
    """Return the norm name with all options of a layer of so many channels, which may cap its groups.

    Frozen norms get the name of the norm itself.
    """
    with torch.device("meta"):
        layer = build_norm(spec.removeprefix("Frozen"), channels)
    if layer is None:
        raise WeightsError("norm (''): names no norm. Fix: give a norm name such as GW.")
    return norm_spec(layer) or spec


def is_same_norm(first: str, second: str, *, with_eps: bool = True) -> bool:
    """Return whether two full norm names compute the same in evaluation, apart from eps if wanted."""
    names = [evaluation_spec(spec) for spec in (first, second)]
    if not with_eps:
        names = [",".join(part for part in name.split(",") if not part.startswith("eps=")) for name in names]
    return names[0] == names[1]


def positions_of(network: Architecture, norms: Mapping[str, str]) -> Positions:
    """Express the norms of layers as config keys."""
    layers = network.norm_layers
    if _one_norm(network, norms):
        spec = _widest(network, norms)
        return Positions("BN", spec, "ALL") if spec.startswith(("GW", "BW")) else Positions(spec, "", "")
    names = {detectron2_name(layer): layer for layer in layers}
    possible = [positions for positions in POSITIONS[1:-1] if network.bottleneck or positions != "S1-B3"]
    for positions in possible:
        whitened = {names[name] for name in norms_at(positions, names)}
        inside = {layer: spec for layer, spec in norms.items() if layer in whitened}
        outside = {layer: spec for layer, spec in norms.items() if layer not in whitened}
        if outside and _one_norm(network, inside) and _one_norm(network, outside):
            return Positions(_widest(network, outside), _widest(network, inside), positions)
    others = [layer for layer, spec in norms.items() if evaluation_spec(spec) != _BN]
    raise WeightsError(
        f"norms other than BN ({summarize_names(others)}): together they are none of the positions "
        f"{', '.join(possible)}. Fix: give weights with one norm at one of them."
    )


def _one_norm(network: Architecture, norms: Mapping[str, str]) -> bool:
    """Return whether one norm name makes all layers."""
    spec, layers = _widest(network, norms), network.norm_layers
    return all(is_same_norm(full_name(spec, layers[layer]), own) for layer, own in norms.items())


def _widest(network: Architecture, norms: Mapping[str, str]) -> str:
    """Return the norm name of the layer with the most channels, where groups are capped least."""
    spec = norms[max(norms, key=lambda layer: network.norm_layers[layer])]
    return "BN" if evaluation_spec(spec) == _BN else spec
