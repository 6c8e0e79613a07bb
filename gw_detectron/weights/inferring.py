"""Infer a ResNet and its norms from the tensors of ImageNet weights, by torchvision's names.

Norms are recorded in the file, proven by the tensors, or stated by the user. They are never
guessed: tensors do not tell GN from GW, or 64 groups from 32.
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
from ..norms import (
    POSITIONS,
    build_norm,
    evaluation_spec,
    full_name,
    is_same_norm,
    norms_at,
)

# of stages, by depth
_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_DEPTHS: dict[tuple[bool, tuple[int, ...]], int] = {
    (depth >= 50, blocks): depth for depth, blocks in _BLOCKS.items()
}
_STAGES = ("layer1", "layer2", "layer3", "layer4")  # of torchvision
#: patterns of torchvision's names and what Detectron2 has instead
#: Source: Detectron2, tools/convert-torchvision-to-d2.py
_TO_DETECTRON2 = {
    r"\bbn(\d)": r"conv\1.norm",
    r"downsample\.0": "shortcut",
    r"downsample\.1": "shortcut.norm",
    r"^(?!layer[1-4]\b)": "stem.",
    **{rf"^layer{stage}\b": f"res{stage + 1}" for stage in range(1, 5)},
}
_TO_TORCHVISION = {
    r"\bconv(\d)\.norm": r"bn\1",
    r"shortcut\.norm": "downsample.1",
    "shortcut": "downsample.0",
    r"^stem\.": "",
    **{rf"^res{stage + 1}\b": f"layer{stage}" for stage in range(1, 5)},
}
_BN = "BN:"  # evaluation_spec of batch normalization, frozen or not
_STATISTICS = {"running_mean", "running_var"}
_BN_FIELDS = _STATISTICS | {"weight", "bias", "num_batches_tracked"}


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
        return {
            name: layer.num_features
            for name, layer in build_torchvision(self).named_modules()
            if isinstance(layer, nn.BatchNorm2d)
        }


def build_torchvision(
    network: Architecture, norms: Mapping[str, str] | None = None
) -> ResNet:
    """Build torchvision's ResNet without a classifier, on the meta device.

    ``norms`` are norm names by its layers; without them it has BN.
    """
    with torch.device("meta"):
        model = ResNet(
            Bottleneck if network.bottleneck else BasicBlock,
            list(_BLOCKS[network.depth]),
            num_classes=1,
            groups=network.groups,
            width_per_group=network.width,
        )
        model.fc = nn.Identity()
        for layer, spec in (norms or {}).items():
            norm = build_norm(spec, network.norm_layers[layer], where=layer)
            model.set_submodule(layer, norm)
    return model


def detectron2_name(name: str) -> str:
    """Translate torchvision's name of a ResNet module or tensor to Detectron2's."""
    return _rename(name, _TO_DETECTRON2)


def _rename(name: str, replacements: Mapping[str, str]) -> str:
    for pattern, replacement in replacements.items():
        name = re.sub(pattern, replacement, name)
    return name


def to_torchvision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Detectron2 ResNet tensors to torchvision's names; the classifier is left out.

    Args:
        tensors: the state dict of a Detectron2 ResNet, e.g. of ``backbone.bottom_up`` in a
            detector with FPN.

    Raises:
        WeightsError: these are not the tensors of a ResNet or ResNeXt.
    """
    names = {
        name: _rename(name, _TO_TORCHVISION)
        for name in tensors
        if not name.startswith("linear.")
    }

    unexpected = [
        name for name, theirs in names.items() if detectron2_name(theirs) != name
    ]
    if unexpected:
        raise WeightsError(
            f"tensors ({summarize_names(unexpected)}): not part of a ResNet. Fix: leave them out."
        )

    renamed = {theirs: tensors[name] for name, theirs in names.items()}
    infer_architecture(renamed)
    return renamed


def infer_architecture(tensors: Mapping[str, Tensor]) -> Architecture:
    """Infer the architecture from torchvision's tensors: blocks and a grouped convolution."""
    blocks = {tuple(name.split(".")[:2]) for name in tensors}
    counts = tuple(sum(block[0] == stage for block in blocks) for stage in _STAGES)
    bottleneck = "layer1.0.conv3.weight" in tensors
    depth = _DEPTHS.get((bottleneck, counts))
    if depth is None:
        raise WeightsError(
            f"tensors ({summarize_names(tensors)}): not the weights of a known ResNet: {counts} "
            f"blocks in {', '.join(_STAGES)}. Fix: give ImageNet weights of a ResNet with "
            f"{', '.join(map(str, _BLOCKS))} layers, in torchvision's or Detectron2's names "
            "without a prefix. For a detector, or a file of Caffe2, set MODEL.WEIGHTS to the file "
            "itself, which Detectron2 reads."
        )

    shape: tuple[int, ...] = getattr(tensors.get("layer1.0.conv2.weight"), "shape", ())
    is_odd = len(shape) != 4 or 0 in shape or shape[0] % shape[1] != 0
    if is_odd or not bottleneck:  # what is odd is found with all other tensors
        return Architecture(depth)
    return Architecture(depth, groups=shape[0] // shape[1], width=shape[1])


class Positions(NamedTuple):
    """The norms of a network as config keys: one at ``positions``, one everywhere else."""

    norm: str
    whiten_norm: str
    positions: str

    def __str__(self) -> str:
        whitened = f", {self.whiten_norm} at {self.positions}" if self.positions else ""
        return self.norm + whitened


def infer_norms(
    network: Architecture,
    tensors: Mapping[str, Tensor],
    recorded: Mapping[str, str] | None,
    stated: str | None,
) -> dict[str, str]:
    """Find the full norm name of each of torchvision's layers.

    Record and statement must agree. ``stated`` is the user's norm name for all layers without BN's
    statistics.
    """
    layers = network.norm_layers
    known = recorded or {}
    norms, unclear = {}, []
    for layer, channels in layers.items():
        spec = known.get(layer) or known.get(detectron2_name(layer))
        scale = tensors.get(f"{layer}.weight")
        # what does not fit any norm is told with all other tensors that do not fit
        is_unfit = scale is None or scale.numel() != channels
        if not spec and (is_unfit or _has_batch_statistics(tensors, layer)):
            spec = "BN"
        elif not spec and recorded is None:
            spec = stated
        if spec is None:
            unclear.append(layer)
        else:
            norms[layer] = full_name(spec, channels)

    if unclear and recorded is not None:
        raise WeightsError(
            f"norms: the file lists none for {summarize_names(unclear)}. Fix: write it again."
        )
    if unclear:
        raise UnknownNormError(
            f"Cannot tell GN from GW for {len(unclear)} of {len(layers)} norm layers "
            f"({summarize_names(unclear)}): their tensors look the same, and show no options. "
            "Fix: pass --norm GW (the paper's setting), --norm GN or another norm name "
            "(in Python, norm=)."
        )
    if stated is not None:
        _check_statement(stated, norms, layers)
    return norms


def _check_statement(
    stated: str, norms: Mapping[str, str], layers: Mapping[str, int]
) -> None:
    """Require that layers have the stated norm, apart from layers with BN if there are others."""
    others = [layer for layer, spec in norms.items() if evaluation_spec(spec) != _BN]
    for layer in others or norms:
        wanted = full_name(stated, layers[layer])
        if not is_same_norm(wanted, norms[layer], with_eps="eps=" in stated):
            raise WeightsError(
                f"norm ({stated!r}): the weights have {norms[layer]} at {layer}. Fix: give that "
                "norm, or none."
            )


def _has_batch_statistics(tensors: Mapping[str, Tensor], layer: str) -> bool:
    """Return whether the tensors of a layer prove batch normalization."""
    prefix = f"{layer}."
    fields = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    return not fields.isdisjoint(_STATISTICS) and fields <= _BN_FIELDS


def positions_of(network: Architecture, norms: Mapping[str, str]) -> Positions:
    """Express the norms of layers as config keys."""
    everywhere = _common_norm(network, norms)
    if everywhere.startswith(("GW", "BW")):
        return Positions("BN", everywhere, "ALL")
    if everywhere:
        return Positions(everywhere, "", "")

    possible = [
        positions
        for positions in POSITIONS
        if positions not in ("", "ALL")
        if network.bottleneck or positions != "S1-B3"
    ]
    for positions in possible:
        whitened = set(norms_at(positions, norms))
        inside = {layer: spec for layer, spec in norms.items() if layer in whitened}
        outside = {
            layer: spec for layer, spec in norms.items() if layer not in whitened
        }
        found = Positions(
            _common_norm(network, outside), _common_norm(network, inside), positions
        )
        if all(found):
            return found

    raise WeightsError(
        f"norms ({summarize_names({*norms.values()})}): they are at none of the positions "
        f"{', '.join(possible)}. Fix: give weights with one norm at one of them."
    )


def _common_norm(network: Architecture, norms: Mapping[str, str]) -> str:
    """Return the norm name that makes all layers, or "".

    It is the one of the layer with most channels, where groups are capped least.
    """
    layers = network.norm_layers
    spec = norms[max(norms, key=layers.__getitem__)]
    if evaluation_spec(spec) == _BN:
        spec = "BN"
    is_common = all(
        is_same_norm(full_name(spec, layers[layer]), own)
        for layer, own in norms.items()
    )
    return spec if is_common else ""
