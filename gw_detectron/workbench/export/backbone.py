"""Export a backbone, with or without FPN, and compare its feature maps with the model's."""

import copy
import itertools
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from detectron2.modeling import FPN, Backbone
from torch import Tensor, nn
from torch.export import Dim

from ...atomic import atomic_folder
from ...errors import ExportError
from ...layers import use_backend
from ...norms.listing import norm_counts
from ...weights import NetworkRecord, Preprocessing, read_weights_file
from ...weights.converting import write_weights_file
from ...weights.network_record import norm_record
from .formats import (
    PARITY,
    ExportedFile,
    check_channels,
    describe_images,
    random_pixels,
    write_parity,
    write_program,
)

_logger = logging.getLogger(__name__)

#: largest allowed difference of a feature map, relative to the map's largest value
TOLERANCE = 1e-3


class FeatureExtractor(nn.Module):
    r"""Copy of a backbone in evaluation mode, on the CPU, in float32.

    .. math:: (p_2, p_3, \dots) = f((\mathrm{pixels} - \mathrm{mean}) / \mathrm{std})

    Args:
        backbone: a Detectron2 backbone; it is copied and not changed.
        preprocessing: how images become its input.

    Shape: pixels of 0 to 255, (N, 3, H, W) -> a tuple of (N, C_i, H / stride_i, W / stride_i) in the order of
    :attr:`names`.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, backbone: Backbone, preprocessing: Preprocessing) -> None:
        super().__init__()
        check_channels(preprocessing)
        self.preprocessing = preprocessing
        for name in ("pixel_mean", "pixel_std"):
            values = torch.tensor(getattr(preprocessing, name), dtype=torch.float32)
            self.register_buffer(name, values.reshape(1, -1, 1, 1), persistent=False)

        copied: Backbone = copy.deepcopy(backbone)
        self.backbone = copied.cpu().float().eval().requires_grad_(False)
        self._outputs = {
            name: {"channels": shape.channels, "stride": shape.stride}
            for name, shape in backbone.output_shape().items()
        }
        #: names of the feature maps, in output order
        self.names = list(self._outputs)
        #: number of pixels that height and width must be a multiple of
        self.multiple = max(1, self.backbone.size_divisibility)
        #: smallest height and width; torch.export specializes dimensions of size one, so every
        #: feature map is larger
        largest_stride = max(output["stride"] for output in self._outputs.values())
        self.smallest_side = (largest_stride // self.multiple + 1) * self.multiple

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        normalized = (images - self.pixel_mean) / self.pixel_std
        features = self.backbone(normalized)
        return tuple(features[name] for name in self.names)

    def sample(self, batch: int, rows: int, columns: int, seed: int = 0) -> Tensor:
        """Draw random pixels; the sides exceed the smallest by multiples of 32."""
        step = max(32, self.multiple)
        height = self.smallest_side + rows * step
        width = self.smallest_side + columns * step
        return random_pixels(batch, self.pixel_mean.numel(), height, width, seed=seed)

    def sample_inputs(self) -> dict[str, Tensor]:
        return {"images": self.sample(2, 1, 2)}

    def dynamic_shapes(self) -> dict[str, Any]:
        # dimensions as multiples tell torch.export that the levels of an FPN fit each other
        least = self.smallest_side // self.multiple
        height = self.multiple * Dim("height", min=least)
        width = self.multiple * Dim("width", min=least)
        return {"images": {0: Dim("batch", min=1), 2: height, 3: width}}

    def describe(self) -> dict[str, Any]:
        images = describe_images(
            self.preprocessing,
            multiple_of=self.multiple,
            smallest_side=self.smallest_side,
        )
        return {"input": images, "outputs": self._outputs}


def export_backbone(
    backbone: Backbone,
    output: str | os.PathLike[str],
    preprocessing: Preprocessing,
    *,
    file_format: str = "pt2",
    fpn: bool = True,
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Export a backbone and check the numbers of the exported file.

    The exported function takes one tensor of pixels, 0 to 255, of any batch size, height and width and returns a
    tuple of feature maps. The folder ``output`` gets the exported file and ``parity.json`` (the
    return value), both or none.

    Args:
        backbone: a Detectron2 backbone with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export in the
            same format, which is replaced.
        preprocessing: how images become the backbone's input.
        file_format: ``pt2`` (torch.export) or ``onnx``; ``safetensors`` writes only the weights,
            for ``MODEL.WEIGHTS``.
        fpn: False exports the ResNet below an FPN.
        source: origin of the weights, copied to ``parity.json``.

    Raises:
        ExportError: the file gives other numbers than the model, or the format cannot express the
            backbone.
        FileAccessError: ``output`` holds other files.
        MissingPackageError: a package that the format needs is not installed.
    """
    if not fpn and isinstance(backbone, FPN):
        backbone = backbone.bottom_up

    file = f"backbone.{file_format}"
    extractor = FeatureExtractor(backbone, preprocessing)
    with atomic_folder(output, (PARITY, file)) as folder:
        _logger.info("Writing %s", file)
        write = _write_weights if file_format == "safetensors" else write_program
        written = write(extractor, folder / file)

        _logger.info("Comparing feature maps with the model's")
        cases = _check_features(extractor, written)
        levels = [level for case in cases for level in case["levels"].values()]
        report = {
            **written.description,
            "norm_layers": norm_counts(backbone),
            "tolerance": TOLERANCE,
            "worst_relative": max(level["relative"] for level in levels),
            "cases": cases,
        }
        return write_parity(folder / file, report, source)


def _write_weights(extractor: FeatureExtractor, path: Path) -> ExportedFile:
    """Write the tensors of a backbone; return the same network with those of the file."""
    backbone = extractor.backbone
    record = NetworkRecord(norm_record(backbone), extractor.preprocessing)
    write_weights_file(path, path.suffix, backbone.state_dict(), record)

    copied = copy.deepcopy(extractor)
    copied.backbone.load_state_dict(read_weights_file(path).value["model"])
    return ExportedFile(copied, extractor.describe())


def _check_features(
    extractor: FeatureExtractor, file: ExportedFile
) -> list[dict[str, Any]]:
    """Compare feature maps at two batch sizes and two image sizes.

    None is a size of the tracing. The model runs the reference backend, which is the exported
    one, so that the difference shows only the export.
    """
    cases = []
    for batch, sides in itertools.product((1, 3), ((0, 3), (2, 0))):
        images = extractor.sample(batch, *sides, seed=1)
        with torch.no_grad(), use_backend("reference"):
            expected = extractor(images)
            found = file.run(images)

        maps = zip(extractor.names, found, expected, strict=True)
        case: dict[str, Any] = {
            "batch": batch,
            "height": images.shape[2],
            "width": images.shape[3],
        }
        case["levels"] = {name: compare_features(name, a, b) for name, a, b in maps}
        cases.append(case)
    return cases


def compare_features(name: str, found: Tensor, expected: Tensor) -> dict[str, Any]:
    r"""Compare a feature map with the model's.

    Returns:
        shape, ``max_abs`` and ``relative`` :math:`= \max |a - b| / \max |b|`.

    Raises:
        ExportError: they differ by more than :data:`TOLERANCE`.
    """
    relative = max_abs = math.inf
    if found.shape == expected.shape:
        difference = (found.double() - expected.double()).abs().max()
        largest = expected.double().abs().max()
        max_abs = difference.item()
        relative = (difference / largest).item() if max_abs else 0.0

    if not relative <= TOLERANCE:  # also for NaN
        raise ExportError(
            f"exported file: {name} {list(found.shape)} differs from the model's "
            f"{list(expected.shape)} by {relative:.1e} of its largest value, allowed is "
            f"{TOLERANCE:g}. Fix: export in another format."
        )
    return {"shape": list(expected.shape), "max_abs": max_abs, "relative": relative}
