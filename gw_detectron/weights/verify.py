"""Compare the features of torchvision's ResNet and Detectron2's, stage by stage."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.layers import ShapeSpec
from PIL import Image
from tabulate import tabulate
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck
from torchvision.models.resnet import ResNet as TorchvisionResNet

from ..config import changed_config, default_config
from ..errors import WeightsError
from ..modeling import build_gw_resnet_backbone
from ..modeling.resnet import STAGES
from .addresses import local_path
from .conversion import DROPPED, Conversion, convert, load_weights
from .network import PREPROCESSING, Preprocessing, build_torchvision
from .reading import sha256_of

#: relative; rounding in float64 stays far below it, and even a missing eps exceeds it by far
TOLERANCE = 1e-7


@dataclass(frozen=True)
class Verification:
    """Result of :func:`verify`."""

    subject: str  # the network under test
    relative: dict[
        str, float
    ]  # stage -> largest difference of its features over the reference's largest magnitude

    @property
    def agrees(self) -> bool:
        return all(value < TOLERANCE for value in self.relative.values())

    def __str__(self) -> str:
        table = tabulate(
            self.relative.items(), headers=["stage", "relative difference"], floatfmt=".1e"
        )
        first = next(
            (stage for stage, value in self.relative.items() if not value < TOLERANCE), ""
        )
        verdict = f"DISAGREES from {first} on." if first else "AGREES."
        return f"Detectron2's ResNet against torchvision's, {self.subject}:\n\n{table}\n\n{verdict}"


@torch.no_grad()
def verify(
    weights: str | os.PathLike[str],
    images: Sequence[Image.Image],
    *,
    source: str | os.PathLike[str] | None = None,
    norm: str | None = None,
) -> Verification:
    """Compare Detectron2's backbone with torchvision's on images, in float64.

    Torchvision's network gets the images as its training did, Detectron2's by detection preprocessing. Torchvision's
    has the norms that the source records or that ``norm`` states; Detectron2's has the norms of the
    converted weights. Errors are those of :func:`.load_weights`.

    Args:
        weights: path or address of converted weights, or of a file that records or proves its norms.
        images: all of one size.
        source: the file that the weights were converted from. Torchvision's network loads it, which verifies the
            conversion; None translates the weights back.
        norm: the norm name of the source's layers without BN's statistics, if the source does not record it.
    """
    conversion = load_weights(local_path(os.fspath(weights), "weights"))
    claimed = _claimed(conversion, source, norm)
    reference = torchvision_backbone(claimed).double()
    pixels = torch.stack(
        [_classification_input(image, conversion.preprocessing) for image in images]
    )
    expected = torchvision_stages(reference, pixels)
    subject = f"{conversion.architecture.name} with {conversion.positions}"
    cfg = config_for(conversion)
    model = detectron2_backbone(conversion, cfg).double()
    found = model(torch.stack([_detection_input(image, cfg) for image in images]))
    return Verification(
        subject, {stage: _difference(found[stage], expected[stage]) for stage in STAGES}
    )


def _claimed(
    conversion: Conversion, source: str | os.PathLike[str] | None, norm: str | None
) -> Conversion:
    """Return the weights as their source or the user's statement describes them."""
    if source is None:
        if norm is None:
            return conversion
        claimed = convert(conversion.source_tensors, norm=norm, preprocessing="torchvision")
        return replace(claimed, preprocessing=conversion.preprocessing)
    origin, digest = conversion.provenance, sha256_of(source)
    if origin is None or digest != origin.source_sha256:
        raise WeightsError(
            f"source ({os.fspath(source)!r}): SHA-256 {digest}, but the weights were converted from {origin}. Fix: "
            "give that file."
        )
    preset = next(
        (name for name, images in PREPROCESSING.items() if images == conversion.preprocessing),
        None,
    )
    return load_weights(source, norm=norm, preprocessing=preset)


def torchvision_backbone(weights: Conversion) -> TorchvisionResNet:
    """Build torchvision's ResNet with the norms, strides and source tensors of weights, in evaluation mode."""
    model = build_torchvision(weights.architecture, weights.norms)
    if weights.preprocessing.stride_in_1x1:
        for block in model.modules():
            if isinstance(block, Bottleneck):
                block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    tensors = {
        name: value
        for name, value in weights.source_tensors.items()
        if not DROPPED.fullmatch(name)
    }
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def torchvision_stages(model: TorchvisionResNet, images: Tensor) -> dict[str, Tensor]:
    """Run torchvision's ResNet on normalized images, (N, 3, H, W); return the output of every stage."""
    x = model.maxpool(model.relu(model.bn1(model.conv1(images))))
    outputs = {"stem": x}
    for stage, layer in zip(
        STAGES[1:], (model.layer1, model.layer2, model.layer3, model.layer4), strict=True
    ):
        outputs[stage] = x = layer(x)
    return outputs


def detectron2_backbone(weights: Conversion, cfg: CfgNode) -> nn.Module:
    """Build a config's backbone with the weights, in evaluation mode."""
    cfg = changed_config(
        cfg, {"MODEL.BACKBONE.FREEZE_AT": 0, "MODEL.RESNETS.OUT_FEATURES": list(STAGES)}
    )
    with torch.device("meta"):  # the values are loaded
        model = build_gw_resnet_backbone(cfg, ShapeSpec(channels=len(cfg.MODEL.PIXEL_MEAN)))
    model.load_state_dict(weights.tensors, assign=True)
    return model.eval()


def config_for(weights: Conversion) -> CfgNode:
    """Build the config of a backbone that fits the weights."""
    cfg = default_config()
    cfg.merge_from_other_cfg(CfgNode(weights.config()))
    return cfg


def _classification_input(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """Preprocess an image as the training on ImageNet did, (3, H, W) float64."""
    order = 1 if preprocessing.input_format == "RGB" else -1
    pixels = np.asarray(image.convert("RGB"), np.float64)[..., ::order]
    return torch.from_numpy(
        ((pixels - preprocessing.pixel_mean) / preprocessing.pixel_std)
        .transpose(2, 0, 1)
        .copy()
    )


def _detection_input(image: Image.Image, cfg: CfgNode) -> Tensor:
    """Preprocess an image as a detector of the config does, (3, H, W) float64."""
    pixels = convert_PIL_to_numpy(image, cfg.INPUT.FORMAT).astype(np.float64)
    return torch.from_numpy(
        ((pixels - cfg.MODEL.PIXEL_MEAN) / cfg.MODEL.PIXEL_STD).transpose(2, 0, 1).copy()
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference; infinite for other sizes (of a wrong stride), NaN and infinite features."""
    if found.shape != expected.shape:
        return math.inf
    gap = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    return gap.item() if gap.isfinite() else math.inf
