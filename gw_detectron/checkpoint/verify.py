"""Proves converted weights, or a config for them, right: the same images through torchvision's ResNet and Detectron2's.

A wrong setting is recognised by its signature: each usual mistake is made on purpose, one at a time, and what it does
to the features is put beside what the config under test does.
"""

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from detectron2.config import CfgNode
from PIL import Image
from tabulate import tabulate
from torch import Tensor

from .convert import Conversion
from .files import load_weights
from .images import classification_input, detection_input
from .networks import (
    LOGITS,
    STAGES,
    config_for,
    detectron2_classifier,
    detectron2_stages,
    torchvision_classifier,
    torchvision_stages,
    torchvision_tensors,
)

# Relative. Both networks run in float64, whose rounding stays far below it, and so even a missing eps far above it.
TOLERANCE = 1e-7

Features = Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far features are from those of torchvision's network.

    Args:
        name: of the setting.
        max_abs: the largest absolute difference, by stage.
        relative: that divided by the largest magnitude of torchvision's, by stage.
        same_top1: part of the images with the same most likely class; None without a classifier.
    """

    name: str
    max_abs: dict[str, float]
    relative: dict[str, float]
    same_top1: float | None

    @property
    def worst(self) -> float:
        """The largest relative difference of the stages a detector uses, and of the logits."""
        return max(value for stage, value in self.relative.items() if stage != "stem")


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found.

    Args:
        subject: the setting under test.
        mistakes: the same weights with one thing wrong.
        verdict: what the numbers say.
        agrees: whether the setting under test is right.
    """

    subject: Difference
    mistakes: tuple[Difference, ...]
    verdict: str
    agrees: bool

    def __str__(self) -> str:
        stages = list(self.subject.relative)
        subject = [[stage, self.subject.max_abs[stage], self.subject.relative[stage]] for stage in stages]
        rows = [[row.name, *(row.relative[stage] for stage in stages), _percent(row)] for row in self.mistakes]
        rows.insert(0, [self.subject.name, *self.subject.relative.values(), _percent(self.subject)])
        return "\n\n".join(
            (
                f"Detectron2's ResNet against torchvision's, {self.subject.name}:",
                tabulate(subject, headers=["stage", "max abs", "relative"], floatfmt=".1e"),
                "Relative difference when one thing is wrong:",
                tabulate(rows, headers=["setting", *stages, "same top-1"], floatfmt=".1e"),
                self.verdict,
            )
        )


def verify(
    weights: str | os.PathLike[str],
    images: Sequence[Image.Image],
    *,
    cfg: CfgNode | None = None,
    source: str | os.PathLike[str] | None = None,
) -> Verification:
    """Compares Detectron2's backbone with torchvision's on images, stage by stage.

    Torchvision's network gets the images by the classification preprocessing, Detectron2's by that of a detector.

    Args:
        weights: converted weights, or a file that can be converted.
        images: all of one size.
        cfg: the config under test; None means the one that goes with the weights.
        source: the file that the weights were converted from. Torchvision's network is then loaded with it, so that
            the conversion itself is proved; otherwise the weights are translated back.

    Raises:
        ValueError: a file is unusable, or the config builds another network.
        OSError: a file cannot be read.
    """
    conversion, provenance = load_weights(weights)
    tensors = torchvision_tensors(weights, source, provenance)
    expected = _torchvision_features(conversion, tensors, images)
    right = config_for(provenance)
    name = f"{provenance.architecture} {provenance.positions or provenance.norm}"
    under_test = right
    if cfg is not None:
        name, under_test = "the config", _with(cfg, {"MODEL.BACKBONE.FREEZE_AT": 0})
    found = _detectron2_features(conversion, under_test, images)
    mistakes, likeness = [], {}
    for mistake in _mistakes(conversion, right):
        features = _detectron2_features(conversion, _with(right, mistake.changes), images, norm_eps=mistake.norm_eps)
        mistakes.append(_difference(mistake.name, features, expected))
        likeness[mistake.name] = _difference(mistake.name, found, features).worst
    subject = _difference(name, found, expected)
    verdict = _verdict(subject, likeness)
    if provenance.pool_norm is None and conversion.pool_norm not in ("", "BN"):
        verdict += (
            f" The norm before the classifier is a guess in both networks, {conversion.pool_norm}, so this says "
            "nothing about its options: convert with --pool-norm."
        )
    return Verification(subject, tuple(mistakes), verdict, subject.worst < TOLERANCE)


def _verdict(subject: Difference, likeness: Mapping[str, float]) -> str:
    if subject.worst < TOLERANCE:
        return f"AGREES: the largest relative difference is {subject.worst:.1e}."
    nearest = min(likeness, key=lambda mistake: likeness[mistake])
    text = f"DIFFERS: the largest relative difference is {subject.worst:.1e}. "
    if likeness[nearest] < TOLERANCE:
        return f"{text}This is the signature of: {nearest}."
    return f"{text}It is the signature of no mistake above; the nearest is: {nearest} ({likeness[nearest]:.1e} off)."


class _Mistake(NamedTuple):
    name: str
    changes: Mapping[str, object]  # of the config that goes with the weights
    norm_eps: float | None = None


def _mistakes(conversion: Conversion, cfg: CfgNode) -> Iterator[_Mistake]:
    blue_first: dict[str, object] = {"INPUT.FORMAT": "BGR"}
    no_std: dict[str, object] = {"MODEL.PIXEL_STD": [1.0, 1.0, 1.0]}
    yield _Mistake("BGR instead of RGB", blue_first)
    yield _Mistake("PIXEL_STD 1", no_std)
    stride: dict[str, object] = {}
    if conversion.architecture.bottleneck:
        stride = {"MODEL.RESNETS.STRIDE_IN_1X1": True}
        yield _Mistake("stride in the 1x1 convolution", stride)
    if any(name.endswith("running_var") for name in conversion.tensors):
        yield _Mistake("batch norm eps 0", {}, norm_eps=0.0)
    swapped: dict[str, object] = {"MODEL.PIXEL_MEAN": list(reversed(cfg.MODEL.PIXEL_MEAN))}
    yield _Mistake("Detectron2's defaults (BGR, std 1, stride in 1x1)", blue_first | no_std | stride | swapped)


def _with(cfg: CfgNode, changes: Mapping[str, object]) -> CfgNode:
    cfg = cfg.clone()
    cfg.defrost()
    cfg.merge_from_list(list(itertools.chain.from_iterable(changes.items())))
    return cfg


@torch.no_grad()
def _torchvision_features(
    conversion: Conversion, tensors: Mapping[str, Tensor], images: Sequence[Image.Image]
) -> Features:
    model = torchvision_classifier(conversion, tensors).double()
    return torchvision_stages(model, torch.stack([classification_input(image) for image in images]))


@torch.no_grad()
def _detectron2_features(
    conversion: Conversion, cfg: CfgNode, images: Sequence[Image.Image], *, norm_eps: float | None = None
) -> Features:
    cfg = _with(cfg, {"MODEL.RESNETS.OUT_FEATURES": list(STAGES)})
    model = detectron2_classifier(conversion, cfg, norm_eps=norm_eps).double()
    return detectron2_stages(model, torch.stack([detection_input(image, cfg) for image in images]))


def _difference(name: str, found: Features, expected: Features) -> Difference:
    max_abs, relative = {}, {}
    for stage, reference in expected.items():
        if stage not in found:
            continue  # torchvision's network has the classifier of the source, which the conversion left out
        # another stride gives another size where the image's is odd; then nothing can be compared
        comparable = found[stage].shape == reference.shape
        gap = (found[stage] - reference).abs().max().item() if comparable else math.inf
        max_abs[stage] = gap if math.isfinite(gap) else math.inf
        relative[stage] = max_abs[stage] / reference.abs().max().clamp_min(1e-30).item()
    same = None
    if LOGITS in expected and LOGITS in found:
        same = (found[LOGITS].argmax(1) == expected[LOGITS].argmax(1)).float().mean().item()
    return Difference(name, max_abs, relative, same)


def _percent(difference: Difference) -> str:
    return "-" if difference.same_top1 is None else f"{difference.same_top1:.0%}"
