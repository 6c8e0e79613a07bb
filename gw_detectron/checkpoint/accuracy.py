"""Top-1 and top-5 accuracy of weights on labelled images, by both preprocessings."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from detectron2.config import CfgNode
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from .files import load_weights
from .images import centre_crop, classification_input, detection_input
from .networks import (
    LOGITS,
    config_for,
    detectron2_classifier,
    detectron2_stages,
    torchvision_classifier,
    torchvision_stages,
    torchvision_tensors,
)


class Accuracy(NamedTuple):
    """Accuracy of a network in percent."""

    network: str
    top1: float
    top5: float
    images: int

    def __str__(self) -> str:
        return f"{self.network}: top-1 {self.top1:.2f} %, top-5 {self.top5:.2f} % of {self.images} images"


def is_labelled(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a folder for each class."""
    return any(path.is_dir() for path in Path(folder).iterdir())


@torch.no_grad()
def measure_accuracy(
    weights: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    cfg: CfgNode | None = None,
    batch_size: int = 16,
) -> list[Accuracy]:
    """Classifies labelled images with torchvision's network, and with Detectron2's as a detector sees them.

    Args:
        weights: with a classifier (``--keep-fc``), converted or not.
        folder: one folder for each class. Their names in order are the classes 0, 1, ..., as in ImageNet's validation
            set; or the names are the numbers themselves, which may be a part of all.
        cfg: the config under test; None means the one that goes with the weights.
        batch_size: images at a time.

    Raises:
        ValueError: the weights have no classifier, or the classes are others than its.
        OSError: a file cannot be read.
    """
    conversion, provenance = load_weights(weights)
    if not conversion.has_classifier:
        raise ValueError(
            f"{weights} has no classifier, so there is no accuracy. Convert with --keep-fc, or give the original file"
        )
    cfg = cfg if cfg is not None else config_for(provenance)
    classes = len(conversion.tensors["linear.bias"])
    ours = detectron2_classifier(conversion, cfg)
    theirs = torchvision_classifier(conversion, torchvision_tensors(weights, None, provenance))

    def both(image: Image.Image) -> tuple[Tensor, Tensor]:
        crop = centre_crop(image)
        return classification_input(crop).float(), detection_input(crop, cfg).float()

    data = ImageFolder(os.fspath(folder), transform=both)
    numbers = torch.tensor(_class_numbers(data.classes, classes))
    hits = torch.zeros(2, 2)
    for (for_theirs, for_ours), labels in tqdm(DataLoader(data, batch_size), desc="classifying", unit="batch"):
        truth = numbers[labels].view(-1, 1)
        for row, logits in enumerate(
            (torchvision_stages(theirs, for_theirs)[LOGITS], detectron2_stages(ours, for_ours)[LOGITS])
        ):
            right = logits.topk(min(5, classes)).indices == truth
            hits[row] += torch.stack((right[:, 0].sum(), right.any(dim=1).sum()))
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
    raise ValueError(
        f"the folders are {len(names)} classes ({names[0]} ... {names[-1]}), but the classifier has {classes}: give "
        f"one folder for each class, or name the folders by their class numbers, 0 ... {classes - 1}"
    )
