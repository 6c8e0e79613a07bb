"""Export a backbone, with or without FPN, and compare its feature maps with the model's."""

import copy
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import FPN, Backbone
from torch import Tensor, nn
from torch.export import Dim

from ...atomic import atomic_folder
from ...errors import ConfigError, ExportError
from ...layers import use_backend
from ...norms.listing import norm_counts
from .formats import (
    PARITY,
    ExportedFile,
    check_format,
    random_pixels,
    write_parity,
    write_program,
)

_logger = logging.getLogger(__name__)

#: largest allowed difference of a feature map, relative to the map's largest value
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Normalization:
    """Image normalization of a model: ``(pixels - mean) / std``, for pixels of 0 to 255."""

    channels: str  # color order, RGB or BGR, or L of gray images
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    inside: bool = (
        False  # the exported function normalizes pixels itself, else it takes normalized images
    )

    def __post_init__(self) -> None:
        counts = {len(self.channels), len(self.pixel_mean), len(self.pixel_std)}
        if self.channels not in ("RGB", "BGR", "L") or len(counts) > 1:
            raise ConfigError(
                f"INPUT.FORMAT ({self.channels!r}): only models of color or gray images are exported. Fix: use RGB or "
                "BGR with three values of MODEL.PIXEL_MEAN and PIXEL_STD, or L with one."
            )

    @classmethod
    def from_config(cls, cfg: CfgNode, *, inside: bool = False) -> "Normalization":
        """Read ``INPUT.FORMAT``, ``MODEL.PIXEL_MEAN`` and ``MODEL.PIXEL_STD``."""
        return cls(
            cfg.INPUT.FORMAT, tuple(cfg.MODEL.PIXEL_MEAN), tuple(cfg.MODEL.PIXEL_STD), inside
        )

    def describe(
        self, name: str, shape: list, multiple_of: int = 1, smallest_side: int = 1
    ) -> dict[str, Any]:
        """Describe an input tensor as plain values, for metadata and reports."""
        sizes = {"multiple_of": multiple_of, "smallest_side": smallest_side}
        return {"name": name, "type": "float32", "shape": shape, **asdict(self), **sizes}


class FeatureExtractor(nn.Module):
    r"""Copy of a backbone in evaluation mode, on the CPU, in float32.

    .. math:: (p_2, p_3, \dots) = f(x) \quad \text{or} \quad f((\mathrm{pixels} - \mathrm{mean}) / \mathrm{std})

    Args:
        backbone: a Detectron2 backbone; it is copied and not changed.
        normalization: how images become its input.

    Shape: (N, 3, H, W) -> a tuple of (N, C_i, H / stride_i, W / stride_i) in the order of :attr:`names`.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, backbone: Backbone, normalization: Normalization) -> None:
        super().__init__()
        self.normalization = normalization
        self.backbone: Backbone = (
            copy.deepcopy(backbone).cpu().float().eval().requires_grad_(False)
        )
        self._outputs = {
            name: (shape.channels, shape.stride)
            for name, shape in backbone.output_shape().items()
        }
        #: names of the feature maps, in output order
        self.names = list(self._outputs)
        #: number of pixels that height and width must be a multiple of
        self.multiple = max(1, self.backbone.size_divisibility)
        #: smallest height and width; torch.export specializes dimensions of size one, so every feature map is larger
        largest_stride = max(stride for _, stride in self._outputs.values())
        self.smallest_side = (largest_stride // self.multiple + 1) * self.multiple
        for name in ("pixel_mean", "pixel_std"):
            values = torch.tensor(getattr(normalization, name), dtype=torch.float32)
            self.register_buffer(name, values.reshape(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if self.normalization.inside:
            images = (images - self.pixel_mean) / self.pixel_std
        features = self.backbone(images)
        return tuple(features[name] for name in self.names)

    def sample(self, batch: int, rows: int, columns: int, seed: int = 0) -> Tensor:
        """Draw random input images; their sides exceed the smallest by multiples of 32 pixels."""
        height, width = (
            self.smallest_side + count * max(32, self.multiple) for count in (rows, columns)
        )
        pixels = random_pixels(
            batch, len(self.normalization.channels), height, width, seed=seed
        )
        return (
            pixels if self.normalization.inside else (pixels - self.pixel_mean) / self.pixel_std
        )

    def sample_inputs(self) -> dict[str, Tensor]:
        return {"images": self.sample(2, 1, 2)}

    def dynamic_shapes(self) -> dict[str, Any]:
        # dimensions as multiples tell torch.export that the levels of an FPN fit each other
        height, width = (
            Dim(name, min=self.smallest_side // self.multiple) for name in ("height", "width")
        )
        return {
            "images": {
                0: Dim("batch", min=1),
                2: self.multiple * height,
                3: self.multiple * width,
            }
        }

    def describe(self) -> dict[str, Any]:
        shape = ["N", len(self.normalization.channels), "H", "W"]
        return {
            "input": self.normalization.describe(
                "images", shape, self.multiple, self.smallest_side
            ),
            "outputs": {
                name: {"channels": c, "stride": s} for name, (c, s) in self._outputs.items()
            },
        }


def export_backbone(
    backbone: Backbone,
    output: str | os.PathLike[str],
    normalization: Normalization,
    *,
    file_format: str = "pt2",
    fpn: bool = True,
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Export a backbone and check the numbers of the exported file.

    The exported function takes one image tensor of any batch size, height and width and returns a tuple of feature
    maps. The folder ``output`` gets the exported file and ``parity.json`` (the return value), both or none.

    Args:
        backbone: a Detectron2 backbone with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export in the same format, which
            is replaced.
        normalization: how images become the backbone's input, and whether the exported function does it.
        file_format: ``pt2`` (torch.export) or ``onnx``.
        fpn: False exports the ResNet below an FPN.
        source: origin of the weights, copied to ``parity.json``.

    Raises:
        ExportError: the file gives other numbers than the model, or the format cannot express the backbone.
        FileAccessError: ``output`` holds other files.
        MissingPackageError: a package that the format needs is not installed.
    """
    check_format(file_format)
    if not fpn and isinstance(backbone, FPN):
        backbone = backbone.bottom_up

    file = f"backbone.{file_format}"
    extractor = FeatureExtractor(backbone, normalization)
    with atomic_folder(output, (PARITY, file)) as folder:
        _logger.info("Writing %s", file)
        written = write_program(extractor, folder / file)
        _logger.info("Comparing feature maps with the model's")
        cases = _check_features(extractor, written)
        worst = max(level["relative"] for case in cases for level in case["levels"].values())
        entries = {**written.description, "norm_layers": norm_counts(backbone)}
        entries |= {"tolerance": TOLERANCE, "worst_relative": worst, "cases": cases}
        return write_parity(folder / file, entries, source)


def _check_features(extractor: FeatureExtractor, file: ExportedFile) -> list[dict[str, Any]]:
    """Compare feature maps at two batch sizes and two image sizes, none of them the size used for tracing.

    The model runs the reference backend, which is the exported one, so that the difference shows only the export.
    """
    cases = []
    for batch in (1, 3):
        for rows, columns in ((0, 3), (2, 0)):
            images = extractor.sample(batch, rows, columns, seed=1)
            with torch.no_grad(), use_backend("reference"):
                expected, found = extractor(images), file.run(images)
            maps = zip(extractor.names, found, expected, strict=True)
            levels = {name: compare_features(name, a, b) for name, a, b in maps}
            cases.append(
                {
                    "batch": batch,
                    "height": images.shape[2],
                    "width": images.shape[3],
                    "levels": levels,
                }
            )
    return cases


def compare_features(name: str, found: Tensor, expected: Tensor) -> dict[str, Any]:
    r"""Return shape, ``max_abs`` and ``relative`` :math:`= \max |a - b| / \max |b|` of a feature map."""
    relative = max_abs = math.inf
    if found.shape == expected.shape:
        scale = expected.double().abs().max().item()
        max_abs = (found.double() - expected.double()).abs().max().item()
        relative = max_abs / scale if scale else math.inf if max_abs else 0.0
    if not relative <= TOLERANCE:  # also for NaN
        raise ExportError(
            f"exported file: {name} {list(found.shape)} differs from the model's {list(expected.shape)} by "
            f"{relative:.1e} of its largest value, allowed is {TOLERANCE:g}. Fix: export in another format."
        )
    return {"shape": list(expected.shape), "max_abs": max_abs, "relative": relative}
