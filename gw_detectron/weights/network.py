"""The network of a weight file: architecture, norms and preprocessing, as its tensors show and its record says.

The record of norms is one dict, ``{layer name: norm name}``, in checkpoints, converted weights and exports alike.
Norms are recorded in the file, proven by the tensors, or stated by the user. Conversion never guesses: tensors do not
tell GN from GW, or 64 groups from 32.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from ..errors import UnknownNormError, WeightsError, summarize_names
from ..norms import (
    POSITIONS,
    build_norm,
    conv_names,
    evaluation_spec,
    norm_rows,
    norm_spec,
    norms_at,
)
from .reading import Contents

#: keys in a checkpoint and in the header of a safetensors file
NORMS, PREPROCESSING_KEY, PROVENANCE = "norms", "preprocessing", "provenance"
_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}  # of stages
_STAGES = {
    f"layer{index}": f"res{index + 1}" for index in range(1, 5)
}  # torchvision -> Detectron2
_BN = "BN:"  # evaluation_spec of batch normalization, frozen or not
_DETECTOR = re.compile(
    r"res2_0_branch2a_w|.*\.res2\.0\.conv1\.weight"
)  # Caffe2's names, or a detector's


@dataclass(frozen=True)
class Preprocessing:
    """Image preprocessing that weights need, as Detectron2's config names it."""

    input_format: str  # RGB or BGR, also the order of the channels below
    pixel_mean: tuple[float, ...]  # subtracted from values of 0 to 255
    pixel_std: tuple[float, ...]  # then divided by
    stride_in_1x1: bool  # the first 1x1 convolution of a stage has the stride, not the 3x3

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "Preprocessing":
        """Read the keys of a config that say how images become a detector's input."""
        return cls(
            cfg.INPUT.FORMAT,
            tuple(cfg.MODEL.PIXEL_MEAN),
            tuple(cfg.MODEL.PIXEL_STD),
            cfg.MODEL.RESNETS.STRIDE_IN_1X1,
        )


# ImageNet weights of the authors, torchvision and timm: the released loader divides by 255, then normalizes.
TORCHVISION = Preprocessing("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), False)
_BGR_MEAN = (103.53, 116.28, 123.675)
#: preprocessing of ImageNet weights by their origin
PREPROCESSING = {
    "torchvision": TORCHVISION,
    "detectron2-msra": Preprocessing("BGR", _BGR_MEAN, (1.0, 1.0, 1.0), True),
    "detectron2-fair": Preprocessing("BGR", _BGR_MEAN, (1.0, 1.0, 1.0), False),
    # FAIR's ResNeXts under detectron2://; the copies under catalog:// were trained with a standard deviation of 1
    "detectron2-fair-resnext": Preprocessing("BGR", _BGR_MEAN, (57.375, 57.12, 58.395), False),
}


@dataclass(frozen=True)
class Provenance:
    """Origin of converted weights: version of this package, name and SHA-256 of the source file."""

    tool: str
    source: str
    source_sha256: str


@dataclass(frozen=True)
class Record:
    """What a file records, by ``asdict``: norm names by layer, ``"WS"`` of standardized convolutions, and origins."""

    norms: Mapping[str, str] | None = None
    preprocessing: Preprocessing | None = None
    provenance: Provenance | None = None


def norm_record(model: nn.Module) -> dict[str, str]:
    """Return the norms of a model as files record them: ``{layer: norm name}`` and ``{convolution: "WS"}``."""
    return {row.layer: row.spec for row in norm_rows(model)} | conv_names(model)


def read_record(contents: Contents) -> Record:
    """Read what a weight file records about its network."""
    values = contents.value if isinstance(contents.value, Mapping) else {}
    try:
        if contents.format == "safetensors":
            keys = (NORMS, PREPROCESSING_KEY, PROVENANCE)
            values = {
                key: json.loads(text) for key, text in contents.metadata.items() if key in keys
            }
        norms, images, origin = (
            values.get(key) for key in (NORMS, PREPROCESSING_KEY, PROVENANCE)
        )
        if NORMS in values and not (
            isinstance(norms, Mapping)
            and all(isinstance(text, str) for pair in norms.items() for text in pair)
        ):
            raise TypeError(
                f"{NORMS}: a {type(norms).__name__} that is not norm names by layer"
            )
        if images is not None:
            rows = {key: tuple(map(float, images[key])) for key in ("pixel_mean", "pixel_std")}
            images = Preprocessing(**(dict(images) | rows))
        elif values.get("__author__") == "torchvision":  # by Detectron2's tool
            images = TORCHVISION
        provenance = (
            None
            if origin is None
            else Provenance(**{key: str(text) for key, text in origin.items()})
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"record of the file: damaged ({error}). Fix: write the file again."
        ) from None
    return Record(norms, images, provenance)


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
        return {
            name: layer.num_features
            for name, layer in modules
            if isinstance(layer, nn.BatchNorm2d)
        }


def build_torchvision(network: Architecture, norms: Mapping[str, str] | None = None) -> ResNet:
    """Build torchvision's ResNet without a classifier, with norm names by its layers, on the meta device."""
    with torch.device("meta"):
        block = Bottleneck if network.bottleneck else BasicBlock
        widths = {"groups": network.groups, "width_per_group": network.width}
        model = ResNet(block, list(_BLOCKS[network.depth]), num_classes=1, **widths)
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
    names = {
        name: _torchvision_name(name) for name in tensors if not name.startswith("linear.")
    }
    if unexpected := [
        name for name, renamed in names.items() if detectron2_name(renamed) != name
    ]:
        raise WeightsError(
            f"tensors ({summarize_names(unexpected)}): not part of a ResNet. Fix: leave them out."
        )
    renamed = {names[name]: tensors[name] for name in names}
    infer_architecture(renamed)
    return renamed


def _torchvision_name(name: str) -> str:
    """Invert :func:`detectron2_name`."""
    name = re.sub(r"\bconv(\d)\.norm", r"bn\1", name)
    name = name.replace("shortcut.norm", "downsample.1").replace("shortcut", "downsample.0")
    return re.sub(
        r"^res(\d)", lambda stage: f"layer{int(stage[1]) - 1}", name.removeprefix("stem.")
    )


def infer_architecture(tensors: Mapping[str, Tensor]) -> Architecture:
    """Infer the architecture from the blocks and a grouped convolution of torchvision's tensors."""
    blocks = {tuple(name.split(".")[:2]) for name in tensors}
    counts = tuple(sum(block[0] == stage for block in blocks) for stage in _STAGES)
    bottleneck = "layer1.0.conv3.weight" in tensors
    depths = [d for d, known in _BLOCKS.items() if known == counts and (d >= 50) == bottleneck]
    if not depths:
        known = ", ".join(map(str, sorted(_BLOCKS)))
        fix = f"give weights of a ResNet with {known} layers, in torchvision's or Detectron2's names without a prefix"
        if any(map(_DETECTOR.fullmatch, tensors)):
            fix = "set MODEL.WEIGHTS to the file itself, which Detectron2 reads: only ImageNet weights are converted"
        raise WeightsError(
            f"tensors ({summarize_names(tensors)}): not the weights of a known ResNet: {counts} blocks "
            f"{'with' if bottleneck else 'without'} bottlenecks in {', '.join(_STAGES)}. Fix: {fix}."
        )
    name = "layer1.0.conv2.weight"
    shape = tuple(tensors[name].shape) if bottleneck and name in tensors else ()
    if len(shape) != 4 or 0 in shape or shape[0] % shape[1]:
        return Architecture(
            depths[0]
        )  # what is odd or missing in a bottleneck is found with all other tensors
    return Architecture(depths[0], groups=shape[0] // shape[1], width=shape[1])


class Positions(NamedTuple):
    """The norms of a network as config keys: one at ``positions``, one everywhere else."""

    norm: str
    whiten_norm: str
    positions: str

    def __str__(self) -> str:
        if self.positions == "ALL":
            return f"{self.whiten_norm} at ALL"
        return (
            f"{self.norm}, {self.whiten_norm} at {self.positions}"
            if self.positions
            else self.norm
        )


def infer_norms(
    network: Architecture, tensors: Mapping[str, Tensor], record: Record, stated: str | None
) -> dict[str, str]:
    """Find the full norm name of each of torchvision's layers; require that record and statement agree.

    ``stated`` is the user's norm name for all layers without BN's statistics.
    """
    layers = network.norm_layers
    unproven = [layer for layer in layers if not _has_batch_statistics(tensors, layer)]
    if (recorded := record.norms) is not None:
        norms = {
            layer: recorded.get(layer) or recorded.get(detectron2_name(layer), "")
            for layer in layers
        }
        norms |= {
            layer: "BN" for layer, spec in norms.items() if not spec and layer not in unproven
        }
        if missing := [layer for layer, spec in norms.items() if not spec]:
            raise WeightsError(
                f"norms: the file lists none for {summarize_names(missing)}. Fix: write it again."
            )
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
        others = [
            layer for layer, spec in norms.items() if evaluation_spec(spec) != _BN
        ] or list(norms)
        for layer in others:
            if not is_same_norm(
                full_name(stated, layers[layer]), norms[layer], with_eps="eps=" in stated
            ):
                raise WeightsError(
                    f"norm ({stated!r}): the weights have {norms[layer]} at {layer}. Fix: give that norm, or none."
                )
    return norms


def _has_batch_statistics(tensors: Mapping[str, Tensor], layer: str) -> bool:
    """Return whether the tensors of a layer prove batch normalization."""
    fields = {
        name.removeprefix(f"{layer}.") for name in tensors if name.startswith(f"{layer}.")
    }
    statistics = {"running_mean", "running_var"}
    return bool(fields & statistics) and fields <= statistics | {
        "weight",
        "bias",
        "num_batches_tracked",
    }


@functools.cache
def full_name(spec: str, channels: int) -> str:
    """Return the norm name with all options of a layer, of frozen norms the norm's; channels may cap the groups."""
    with torch.device("meta"):
        layer = build_norm(spec.removeprefix("Frozen"), channels)
    if layer is None:
        raise WeightsError("norm (''): names no norm. Fix: give a norm name such as GW.")
    return norm_spec(layer) or spec


def is_same_norm(first: str, second: str, *, with_eps: bool = True) -> bool:
    """Return whether two full norm names compute the same in evaluation, apart from eps if wanted."""
    names = [evaluation_spec(spec) for spec in (first, second)]
    if not with_eps:
        names = [
            ",".join(part for part in name.split(",") if not part.startswith("eps="))
            for name in names
        ]
    return names[0] == names[1]


def positions_of(network: Architecture, norms: Mapping[str, str]) -> Positions:
    """Express the norms of layers as config keys."""
    if spec := _common_norm(network, norms):
        return (
            Positions("BN", spec, "ALL")
            if spec.startswith(("GW", "BW"))
            else Positions(spec, "", "")
        )
    names = {detectron2_name(layer): layer for layer in network.norm_layers}
    possible = [
        positions for positions in POSITIONS[1:-1] if network.bottleneck or positions != "S1-B3"
    ]
    for positions in possible:
        whitened = {names[name] for name in norms_at(positions, names)}
        inside = _common_norm(
            network, {layer: spec for layer, spec in norms.items() if layer in whitened}
        )
        outside = _common_norm(
            network, {layer: spec for layer, spec in norms.items() if layer not in whitened}
        )
        if inside and outside:
            return Positions(outside, inside, positions)
    others = [layer for layer, spec in norms.items() if evaluation_spec(spec) != _BN]
    raise WeightsError(
        f"norms other than BN ({summarize_names(others)}): they are at none of the positions "
        f"{', '.join(possible)}. Fix: give weights with one norm at one of them."
    )


def _common_norm(network: Architecture, norms: Mapping[str, str]) -> str:
    """Return the norm name that makes all layers, or "": the one of most channels, where groups are capped least."""
    layers = network.norm_layers
    spec = norms[max(norms, key=lambda layer: layers[layer])]
    if not all(
        is_same_norm(full_name(spec, layers[layer]), own) for layer, own in norms.items()
    ):
        return ""
    return "BN" if evaluation_spec(spec) == _BN else spec
