"""Parity check: an exported file and its model give the same numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ExportError, ParityError
from ..layers import use_backend
from .feature_extractor import FeatureExtractor

#: largest allowed difference of a feature map, relative to the map's largest value
TOLERANCE = 1e-3

Run = Callable[..., Sequence[Tensor]]


def check_parity(extractor: FeatureExtractor, run: Run) -> list[dict[str, Any]]:
    r"""Compare the feature maps of an exported file and its model.

    Two batch sizes and two image sizes are compared.

    .. math:: \mathrm{relative} = \max |a - b| / \max |b|

    a is the feature map of the file, b that of the model. No size is the one used for tracing. The model runs the
    reference backend, which is the exported one, so that the difference shows the export alone.

    Args:
        extractor: the model.
        run: calls the exported file.

    Returns:
        One dict per input: ``batch``, ``height``, ``width``, and ``levels``, which maps every feature map to its
        ``shape``, ``max_abs`` and ``relative``.

    Raises:
        ParityError: a relative difference is above :data:`TOLERANCE`, or a shape or a name differs.
        ExportError: the model itself gives NaN or infinity.
    """
    sizes = ((extractor.side(0), extractor.side(3)), (extractor.side(2), extractor.side(0)))
    cases = []
    for batch in (1, 3):
        for height, width in sizes:
            images = extractor.sample(batch, height, width, seed=1)
            with torch.no_grad(), use_backend("reference"):
                expected = extractor(images)
                found = run(images)
            if len(found) != len(expected):
                raise ParityError(
                    f"exported file: has {len(found)} feature maps, the model {len(expected)}. "
                    "Fix: export in another format."
                )
            maps = zip(extractor.names, found, expected, strict=True)
            levels = {name: compare(name, a, b) for name, a, b in maps}
            cases.append({"batch": batch, "height": height, "width": width, "levels": levels})
    return cases


def compare(name: str, found: Tensor, expected: Tensor) -> dict[str, Any]:
    """Compare one output of any shape with the model's output.

    Raises:
        ParityError: the relative difference is above :data:`TOLERANCE`, or the shape differs.
        ExportError: ``expected`` holds NaN or infinity.
    """
    shape = list(expected.shape)
    if list(found.shape) != shape:
        raise ParityError(
            f"exported file: {name} has shape {list(found.shape)}, the model's has {shape}. "
            "Fix: export in another format."
        )
    if not torch.isfinite(expected).all():
        raise ExportError(f"model: {name} holds NaN or infinity. Fix: check the weights before you export them.")
    scale = expected.double().abs().max().item()
    max_abs = (found.double() - expected.double()).abs().max().item()
    relative = max_abs / scale if scale else math.inf if max_abs else 0.0
    if not relative <= TOLERANCE:  # also for NaN
        raise ParityError(
            f"exported file: {name} differs from the model's by {relative:.1e} of its largest value, allowed is "
            f"{TOLERANCE:g}; nothing was written. Fix: export in another format."
        )
    return {"shape": shape, "max_abs": max_abs, "relative": relative}


def worst_relative(cases: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest relative difference over all inputs and outputs."""
    return max(level["relative"] for case in cases for level in case["levels"].values())
