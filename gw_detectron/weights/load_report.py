"""What a checkpoint brings for a model: which tensors are loaded, missing or of another shape."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from detectron2.layers import FrozenBatchNorm2d
from torch import Size, nn

from ..errors import WeightsError, summarize_names
from ..layers.mixed_norms import MixedNorm

_BACKBONE_NAME = re.compile(r"(backbone\.(bottom_up\.)?)?(stem\.conv1|res[2-5]\.\d+)\.")
_TORCHVISION_NAME = re.compile(r"(module\.)?layer1\.0\.conv1\.weight")
_COUNTER = ".num_batches_tracked"
#: of old checkpoints; the config decides them now
_ANCHORS = ".cell_anchors."
#: of a deformable convolution, which a classifier does not have; zero at first
_OFFSETS = ".conv2_offset."
NO_STATISTICS = "MixGW and MixBN need BN's running statistics, which these weights have multiplied into the scale."
GIVE_STATISTICS = "give weights with statistics, such as detectron2://ImageNetPretrained/torchvision/R-50.pkl."


@dataclass
class LoadReport:
    """Report of the loaded and the missing tensors of a detector.

    ``str(report)`` is one line:
    ``backbone: 231/231 tensors; FPN and heads are randomly initialized, as expected``.

    Attributes:
        backbone: the tensors of the model's ResNet; res5 of a C4 detector's head is part of it.
        heads: all other tensors: of FPN and heads, and the offsets of deformable convolutions.
        is_loaded: False if no checkpoint was loaded.
        loaded: the tensors that the checkpoint has in the model's shapes.
        missing: tensors of the backbone that were not loaded.
        unexpected: backbone tensors of the checkpoint that the model does not have.
        new: tensors of the heads that were not loaded.
        resized: layers of the heads with another number of outputs, as for other classes, and a text.
        unfit: other tensors of FPN and heads that only one side has, or with other shapes, though
            both have this part.
        unused: parts of the checkpoint that the model does not have, next to others that it has.
        frozen: number of FrozenBN layers whose statistics the checkpoint has multiplied into the
            scale, as in Caffe2's files.
        fix: what to do if the backbone is not complete.
    """

    backbone: list[str]
    heads: list[str]
    is_loaded: bool = False
    loaded: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    unfit: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    frozen: int = 0
    fix: str = ""

    def __str__(self) -> str:
        if not self.is_loaded:
            return "no weights were loaded: the whole model is randomly initialized"

        loaded = self.loaded.intersection(self.backbone)
        text = f"backbone: {len(loaded)}/{len(self.backbone)} tensors"
        if self.unexpected:
            names = summarize_names(self.unexpected)
            text += f"; {len(self.unexpected)} unexpected tensors in the checkpoint ({names})"
        if self.frozen:
            text += f"; {self.frozen} FrozenBN without statistics, as in Caffe2 weights"

        count = len(self.heads)
        if self.new and len(self.new) == count:
            return f"{text}; FPN and heads are randomly initialized, as expected"
        if count:
            text += f"; FPN and heads: {count - len(self.new)}/{count}"
        if self.resized:
            text += f"; new outputs: {summarize_names(self.resized.values(), 8)}"
        absent = [name for name in self.new if _layer(name) not in self.resized]
        if absent:
            text += f"; new: {summarize_names(absent)}"
        if self.unused:
            text += f"; not in the model: {summarize_names(self.unused)}"
        return text

    def check(self) -> None:
        """Raise :class:`WeightsError` unless the whole backbone, and the parts of a detector, were loaded."""
        if self.missing or self.unexpected:
            lines = [f"MODEL.WEIGHTS: does not fit the model: {self}"]
            if self.missing:
                lines.append(f"Missing: {summarize_names(self.missing)}.")
            lines.append(self.fix)
            raise WeightsError("\n  ".join(lines))
        if self.unfit:
            raise WeightsError(
                "MODEL.WEIGHTS: another detector than the model: tensors (file -> model) "
                f"{summarize_names(self.unfit, 3)}. Fix: set MODEL as in the config of that detector, which "
                "its run folder or Detectron2's model zoo has (--config-file), or give weights of a "
                "backbone. train and eval accept random values with --allow-partial."
            )


def empty_report(model: nn.Module) -> LoadReport:
    """Return the report of a model whose values are all random."""
    prefixes = resnet_prefixes(model)
    names = [name for name in model.state_dict() if not name.endswith(_COUNTER)]
    backbone = [
        name for name in names if name.startswith(prefixes) and _OFFSETS not in name
    ]
    heads = [name for name in names if name not in backbone]
    return LoadReport(backbone, heads, missing=backbone, new=heads)


def compare_tensors(
    model: nn.Module,
    given: Collection[str],
    stored: Mapping[str, Size],
    *,
    is_fused: bool,
) -> LoadReport:
    """Compare the tensors of a checkpoint with a model's.

    Args:
        model: the detector, or a bare backbone, before the tensors are loaded.
        given: names of the tensors with the model's shapes, and of those that the model does not
            have, under the model's names where these are known.
        stored: the shapes of all tensors of the checkpoint, under the same names.
        is_fused: BN's statistics are multiplied into its scale, as in Caffe2's files.
    """
    report = empty_report(model)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    report.is_loaded = True
    report.loaded = shapes.keys() & given
    report.new = [name for name in report.heads if name not in given]

    statistics = _statistics_of_frozen_norms(model) if is_fused else set()
    report.frozen = len(statistics) // 2
    present = report.loaded | statistics
    report.missing = [name for name in report.backbone if name not in present]
    unused = (_COUNTER, "stem.conv1.bias") if is_fused else _COUNTER
    report.unexpected = sorted(
        name
        for name in given
        if name not in shapes
        and _BACKBONE_NAME.match(name)
        and not name.endswith(unused)
    )
    report.fix = _fix_of_backbone(model, given, is_fused=is_fused)
    _compare_heads(report, shapes, stored)
    return report


def _fix_of_backbone(
    model: nn.Module, given: Collection[str], *, is_fused: bool
) -> str:
    is_mixed = any(isinstance(layer, MixedNorm) for layer in model.modules())
    if is_fused and is_mixed:
        return f"{NO_STATISTICS} Fix: {GIVE_STATISTICS}"
    if any(map(_TORCHVISION_NAME.fullmatch, given)):
        return "It has torchvision's names. Fix: gw-detectron weights convert."
    return (
        "Fix: set MODEL.RESNETS (DEPTH, NUM_GROUPS, WIDTH_PER_GROUP, NORM, "
        "WHITEN_POSITIONS) as the weights need it, or give other weights. train and eval "
        "accept random values with --allow-partial."
    )


def _compare_heads(
    report: LoadReport, ours: Mapping[str, Size], stored: Mapping[str, Size]
) -> None:
    """Compare FPN and heads: the parts that the checkpoint and the model both have."""
    theirs = [
        name
        for name in stored
        if name not in report.backbone
        and not _BACKBONE_NAME.match(name)
        and not name.endswith(_COUNTER)
        and _ANCHORS not in name
    ]
    their_parts = {_part(name) for name in theirs}
    common = their_parts.intersection(map(_part, report.heads))
    if not common:  # weights of a backbone
        return

    report.unused = sorted(their_parts - common)
    for name in dict.fromkeys((*report.new, *theirs)):
        if _part(name) not in common or name in report.loaded:
            continue
        here, there = ours.get(name), stored.get(name)
        if here and there and here[1:] == there[1:]:
            layer = _layer(name)
            report.resized[layer] = f"{layer} {there[0]} -> {here[0]}"
        else:
            report.unfit.append(f"{name} {_shape_text(there)} -> {_shape_text(here)}")


def _layer(name: str) -> str:
    """Return the layer of a tensor."""
    return name.rpartition(".")[0]


def _part(name: str) -> str:
    """Return the part of a detector that a tensor belongs to: the backbone with its FPN, or one head."""
    parts = name.split(".")
    return parts[0] if parts[0] == "backbone" else ".".join(parts[:2])


def _shape_text(shape: Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def resnet_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the ResNet's names in a model.

    C4 detectors have its last stage in the head.
    """
    backbone = getattr(model, "backbone", model)
    bottom_up = getattr(backbone, "bottom_up", backbone)
    res5 = getattr(getattr(model, "roi_heads", None), "res5", None)
    names = [name for name, part in model.named_modules() if part in (bottom_up, res5)]
    return tuple(f"{name}." if name else "" for name in names)


def _statistics_of_frozen_norms(model: nn.Module) -> set[str]:
    return {
        f"{name}.{field}"
        for name, layer in model.named_modules()
        if isinstance(layer, FrozenBatchNorm2d)
        for field in ("running_mean", "running_var")
    }
