"""The proof of an export: its file and the model it was made from give the same numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layers import use_path
from .features import Features

#: the largest difference of a feature map, as a part of that map's largest value, that an export may have
TOLERANCE = 1e-3

Run = Callable[[Tensor], Sequence[Tensor]]


class ParityError(ValueError):
    """The exported file gives other numbers than the model."""


def check_parity(features: Features, run: Run) -> list[dict[str, Any]]:
    r"""Compares an exported file with the model at two batch sizes and two image sizes.

    .. math:: \mathrm{relative} = \max |a - b| / \max |b|

    with the file's feature map a and the model's b. None of the sizes is the one that the export was made with. The
    model takes the path of whitening that is exported, so that the numbers are those of the export alone.

    Args:
        features: the model.
        run: calls the exported file.

    Returns:
        For each of the four inputs: its ``batch``, ``height`` and ``width``, and under ``levels`` for each feature map
        its ``shape``, ``max_abs`` and ``relative``.

    Raises:
        ParityError: a relative difference is above :data:`TOLERANCE`, or a shape or a name differs.
        ValueError: the model itself gives NaN or infinity.
    """
    sizes = ((features.side(0), features.side(3)), (features.side(2), features.side(0)))
    cases = []
    for batch in (1, 3):
        for height, width in sizes:
            images = features.sample(batch, height, width, seed=1)
            with torch.no_grad(), use_path("reference"):
                expected = dict(zip(features.names, features(images), strict=True))
                found = run(images)
            if len(found) != len(expected):
                raise ParityError(f"the exported file gives {len(found)} feature maps, the model {len(expected)}")
            levels = {name: compare(name, a, b) for a, (name, b) in zip(found, expected.items(), strict=True)}
            cases.append({"batch": batch, "height": height, "width": width, "levels": levels})
    return cases


def compare(name: str, found: Tensor, expected: Tensor) -> dict[str, Any]:
    """Compares one tensor, (...) of any shape, with what the model gives.

    Raises:
        ParityError: the relative difference is above :data:`TOLERANCE`, or the shape differs.
        ValueError: ``expected`` holds NaN or infinity.
    """
    shape = list(expected.shape)
    if list(found.shape) != shape:
        raise ParityError(f"{name} of the exported file has the shape {list(found.shape)}, the model's has {shape}")
    if not torch.isfinite(expected).all():
        raise ValueError(f"the model's {name} holds NaN or infinity; check its weights before exporting them")
    if expected.numel() == 0:
        return {"shape": shape, "max_abs": 0.0, "relative": 0.0}
    scale = expected.double().abs().max().item()
    max_abs = (found.double() - expected.double()).abs().max().item()
    relative = max_abs / scale if scale else math.inf if max_abs else 0.0
    if not relative <= TOLERANCE:  # also for NaN
        raise ParityError(
            f"{name} of the exported file differs from the model's by {relative:.1e} of its largest value, more than "
            f"the allowed {TOLERANCE:g}; nothing was written"
        )
    return {"shape": shape, "max_abs": max_abs, "relative": relative}


def worst_relative(cases: Sequence[Mapping[str, Any]]) -> float:
    """The largest relative difference of all inputs and levels."""
    return max(level["relative"] for case in cases for level in case["levels"].values())
