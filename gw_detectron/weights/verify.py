"""Compare the features of torchvision's ResNet and Detectron2's.

To name a wrong setting, each usual mistake is made on purpose and its features are compared with those under test.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from detectron2.config import CfgNode
from PIL import Image
from tabulate import tabulate
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from ..config import changed_config
from ..data.images import center_crop, classification_input, detection_input
from ..errors import DataError, UnknownNormError, WeightsError
from ..progress import progress_bar
from .catalog import local_path
from .conversion import Conversion, convert
from .provenance import PREPROCESSING, TORCHVISION, Preprocessing, sha256_of
from .reference_networks import (
    LOGITS,
    config_for,
    detectron2_classifier,
    detectron2_stages,
    torchvision_classifier,
    torchvision_stages,
)
from .weights_io import load_weights

# Relative. Rounding in float64 stays far below it; even a missing eps exceeds it by far.
TOLERANCE = 1e-7


@dataclass(frozen=True)
class Difference:
    """Differences between the features of a setting and of the reference.

    Args:
        name: of the setting.
        max_abs: stage -> largest absolute difference.
        relative: stage -> that, divided by the reference's largest magnitude.
        same_top1: fraction of the images with the same most likely class; None without a classifier.
    """

    name: str
    max_abs: dict[str, float]
    relative: dict[str, float]
    same_top1: float | None

    @property
    def worst(self) -> float:
        """The largest relative difference, without the stem, which detectors do not use."""
        return max(value for stage, value in self.relative.items() if stage != "stem")


@dataclass(frozen=True)
class Verification:
    """Result of :func:`verify`.

    Args:
        subject: the setting under test.
        mistakes: the same weights with one wrong setting.
        verdict: one sentence, beginning with ``AGREES`` or ``DISAGREES``.
        agrees: the setting under test is right.
    """

    subject: Difference
    mistakes: tuple[Difference, ...]
    verdict: str
    agrees: bool

    def __str__(self) -> str:
        stages = list(self.subject.relative)
        subject = [[stage, self.subject.max_abs[stage], self.subject.relative[stage]] for stage in stages]
        rows = [
            [row.name, *map(row.relative.get, stages), "-" if row.same_top1 is None else f"{row.same_top1:.0%}"]
            for row in (self.subject, *self.mistakes)
        ]
        return "\n\n".join(
            (
                f"Detectron2's ResNet against torchvision's, {self.subject.name}:",
                tabulate(subject, headers=["stage", "max abs", "relative"], floatfmt=".1e"),
                "Relative difference with one wrong setting:",
                tabulate(rows, headers=["setting", *stages, "same top-1"], floatfmt=".1e"),
                self.verdict,
            )
        )


@torch.no_grad()
def verify(
    weights: str | os.PathLike[str],
    images: Sequence[Image.Image],
    *,
    cfg: CfgNode | None = None,
    source: str | os.PathLike[str] | None = None,
    norm: str | None = None,
) -> Verification:
    """Compare Detectron2's backbone with torchvision's on images, in float64.

    Torchvision's network gets the images by classification preprocessing, Detectron2's by detection preprocessing.
    Torchvision's network has the norms that the source records or that ``norm`` states; Detectron2's has those of the
    converted weights or of the config.

    Args:
        weights: path or address of converted weights, or of a file that can be converted.
        images: all of one size.
        cfg: the config under test; None takes the one that fits the weights.
        source: the file that the weights were converted from. Torchvision's network loads it, which verifies the
            conversion; None translates the weights back.
        norm: the norm name of the source's layers without BN's statistics, if the source does not record it.

    Raises:
        ValueError: a file cannot be used, or the config builds another network.
        OSError: a file cannot be read.
    """
    conversion = _load(weights, norm)
    provenance, claimed = conversion.provenance, conversion
    if source is not None:
        if (digest := sha256_of(source)) != provenance.source_sha256:
            raise WeightsError(
                f"source ({os.fspath(source)!r}): SHA-256 {digest}, but {weights} was converted from "
                f"{provenance.source} with {provenance.source_sha256}. Fix: give that file."
            )
        preset = next((name for name, images in PREPROCESSING.items() if images == provenance.preprocessing), None)
        claimed = load_weights(source, norm=norm, keep_fc=False, preprocessing=preset, sha256=digest)
    elif norm is not None:
        claimed = convert(conversion.source_tensors, norm=norm)
    facts = replace(claimed.provenance, preprocessing=provenance.preprocessing, pool_norm=provenance.pool_norm)
    claimed = replace(claimed, provenance=facts)
    reference = torchvision_classifier(claimed, claimed.source_tensors).double()
    inputs = [_classification_input(image, provenance.preprocessing) for image in images]
    expected = torchvision_stages(reference, torch.stack(inputs))

    def detectron2_features(cfg: CfgNode, norm_eps: float | None = None) -> dict[str, Tensor]:
        model = detectron2_classifier(conversion, cfg, norm_eps=norm_eps).double()
        return detectron2_stages(model, torch.stack([detection_input(image, cfg) for image in images]))

    right = config_for(provenance)
    found = detectron2_features(right if cfg is None else cfg)
    name = "the config" if cfg is not None else f"{provenance.architecture} {provenance.norms}"
    subject = _difference(name, found, expected)
    mistakes, distances = [], {}
    for mistake, changes, norm_eps in _usual_mistakes(conversion, right):
        features = detectron2_features(changed_config(right, changes), norm_eps)
        mistakes.append(_difference(mistake, features, expected))
        distances[mistake] = _difference(mistake, found, features).worst
    verdict, recorded, stated = _verdict(subject, distances), provenance.norms, facts.norms
    if subject.worst >= TOLERANCE and str(stated) != str(recorded):
        verdict += f" The weights record {recorded}, --norm says {stated}. Fix: leave --norm out, or give that norm."
    return Verification(subject, tuple(mistakes), verdict, subject.worst < TOLERANCE)


def _load(weights: str | os.PathLike[str], norm: str | None) -> Conversion:
    """Load converted weights, or a source whose norm is stated."""
    path = local_path(os.fspath(weights), "weights")
    try:
        return load_weights(path)
    except UnknownNormError:
        if norm is None:
            raise
        return load_weights(path, norm=norm)


def _classification_input(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """Preprocess an image as in the training of the weights, without Detectron2."""
    if preprocessing == TORCHVISION:
        return classification_input(image)
    pixels = np.asarray(image.convert("RGB"), np.float64)[..., :: 1 if preprocessing.input_format == "RGB" else -1]
    return torch.from_numpy(((pixels - preprocessing.pixel_mean) / preprocessing.pixel_std).transpose(2, 0, 1).copy())


def _verdict(subject: Difference, distances: Mapping[str, float]) -> str:
    if subject.worst < TOLERANCE:
        return f"AGREES: the largest relative difference is {subject.worst:.1e}."
    nearest = min(distances, key=lambda mistake: distances[mistake])
    text = f"DISAGREES: the largest relative difference is {subject.worst:.1e}. "
    if distances[nearest] < TOLERANCE:
        return f"{text}This is the signature of: {nearest}."
    return f"{text}It is the signature of no mistake above; the nearest is: {nearest} ({distances[nearest]:.1e} off)."


def _usual_mistakes(conversion: Conversion, cfg: CfgNode) -> Iterator[tuple[str, Mapping[str, object], float | None]]:
    """Yield the usual mistakes in a config.

    A mistake is its name, the changes of the right config, and the eps of batch norms.
    """
    right = cfg.INPUT.FORMAT
    wrong, in_1x1 = "RGB" if right == "BGR" else "BGR", cfg.MODEL.RESNETS.STRIDE_IN_1X1
    yield f"{wrong} instead of {right}", {"INPUT.FORMAT": wrong}, None
    no_std = {"MODEL.PIXEL_STD": [1.0, 1.0, 1.0]}
    if conversion.provenance.preprocessing.pixel_std != (1.0, 1.0, 1.0):
        yield "PIXEL_STD 1", no_std, None
    stride = {"MODEL.RESNETS.STRIDE_IN_1X1": True} if conversion.architecture.bottleneck else {}
    if stride:
        side = "3x3" if in_1x1 else "1x1"
        yield f"stride in the {side} convolution", dict.fromkeys(stride, not in_1x1), None
    if any(name.endswith("running_var") for name in conversion.tensors):
        yield "batch norm eps 0", {}, 0.0
    defaults = {"INPUT.FORMAT": "BGR", **no_std, **stride, "MODEL.PIXEL_MEAN": [103.53, 116.28, 123.675]}
    if conversion.provenance.preprocessing != PREPROCESSING["detectron2-msra"]:
        yield "Detectron2's defaults (BGR, std 1, stride in 1x1)", defaults, None


def _difference(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Difference:
    max_abs, relative, same_top1 = {}, {}, None
    for stage in (stage for stage in expected if stage in found):  # the source may have a classifier that was dropped
        # with a wrong stride, odd sizes give another size, which cannot be compared
        comparable = found[stage].shape == expected[stage].shape
        gap = (found[stage] - expected[stage]).abs().max().item() if comparable else math.inf
        finite = math.isfinite(gap)  # NaN and infinite features agree with nothing
        max_abs[stage] = gap if finite else math.inf
        relative[stage] = gap / expected[stage].abs().max().clamp_min(1e-30).item() if finite else math.inf
    if LOGITS in relative:
        same_top1 = (found[LOGITS].argmax(1) == expected[LOGITS].argmax(1)).float().mean().item()
    return Difference(name, max_abs, relative, same_top1)


class Accuracy(NamedTuple):
    """Accuracy of a network in percent."""

    network: str
    top1: float
    top5: float
    images: int

    def __str__(self) -> str:
        return f"{self.network}: top-1 {self.top1:.2f} %, top-5 {self.top5:.2f} % of {self.images} images"


def is_labeled(folder: str | os.PathLike[str]) -> bool:
    """Check whether a folder has subfolders, one for each class."""
    return any(path.is_dir() for path in Path(folder).iterdir())


@torch.no_grad()
def measure_accuracy(
    weights: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    cfg: CfgNode | None = None,
    batch_size: int = 16,
    norm: str | None = None,
) -> list[Accuracy]:
    """Measure the accuracy of torchvision's network and of Detectron2's.

    Args:
        weights: path or address; with a classifier (``--keep-fc``), converted or not.
        folder: one subfolder for each class. Sorted names are the classes 0, 1, ..., as in ImageNet's validation set.
            If all names are numbers, they are the classes; some may be absent.
        cfg: the config under test; None takes the one that fits the weights.
        batch_size: images at a time.
        norm: see :func:`verify`.

    Raises:
        WeightsError: the weights have no classifier.
        DataError: the classes of the folder do not fit the classifier.
        OSError: a file cannot be read.
    """
    conversion = _load(weights, norm)
    if not conversion.has_classifier:
        raise WeightsError(
            f"weights ({os.fspath(weights)!r}): have no classifier. Fix: convert with --keep-fc, or give the source."
        )
    cfg = cfg if cfg is not None else config_for(conversion.provenance)
    classes = len(conversion.tensors["linear.bias"])
    torchvision_model = torchvision_classifier(conversion, conversion.source_tensors)
    detectron2_model = detectron2_classifier(conversion, cfg)

    def both_inputs(image: Image.Image) -> tuple[Tensor, Tensor]:
        crop = center_crop(image)
        reference = _classification_input(crop, conversion.provenance.preprocessing)
        return reference.float(), detection_input(crop, cfg).float()

    try:
        data = ImageFolder(os.fspath(folder), transform=both_inputs)
    except FileNotFoundError as error:  # of a class
        raise DataError(f"images ({os.fspath(folder)!r}): {error}. Fix: put images into each class folder.") from None
    numbers = torch.tensor(_class_numbers(data.classes, classes))
    hits = torch.zeros(2, 2)
    for inputs, labels in progress_bar(DataLoader(data, batch_size), desc="classifying", unit="batch"):
        outputs = (
            torchvision_stages(torchvision_model, inputs[0]),
            detectron2_stages(detectron2_model, inputs[1]),
        )
        for row, output in zip(hits, outputs, strict=True):
            right = output[LOGITS].topk(min(5, classes)).indices == numbers[labels].view(-1, 1)
            row += torch.stack((right[:, 0].sum(), right.any(dim=1).sum()))
    names = ("torchvision's network, classification preprocessing", "Detectron2's network, detection preprocessing")
    percent = (100 * hits / len(data)).tolist()
    return [Accuracy(name, top1, top5, len(data)) for name, (top1, top5) in zip(names, percent, strict=True)]


def _class_numbers(names: list[str], classes: int) -> list[int]:
    if all(name.isdecimal() for name in names):
        numbers = [int(name) for name in names]
        if max(numbers) < classes:
            return numbers
    elif len(names) == classes:
        return list(range(classes))
    raise DataError(
        f"labeled images ({len(names)} classes, {names[0]} ... {names[-1]}): the classifier has {classes}. Fix: "
        f"give a folder for each class, or name folders by class number, 0 ... {classes - 1}."
    )
