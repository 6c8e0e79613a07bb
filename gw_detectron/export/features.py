"""What is exported: a backbone as a function of one tensor that returns a tuple of feature maps with known names."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn


@dataclass(frozen=True)
class Normalisation:
    """How images become the backbone's input.

    Args:
        channels: the order of the colour channels, ``RGB`` or ``BGR``.
        pixel_mean: subtracted from the pixels, one number for each channel, on the scale 0..255.
        pixel_std: what the difference is divided by, one number for each channel.
        inside: True if the exported function takes pixels and does this itself, False if it takes its result.
    """

    channels: str
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    inside: bool = False

    @classmethod
    def from_config(cls, cfg: CfgNode, *, inside: bool = False) -> "Normalisation":
        """Reads ``INPUT.FORMAT``, ``MODEL.PIXEL_MEAN`` and ``MODEL.PIXEL_STD``."""
        return cls(cfg.INPUT.FORMAT, tuple(cfg.MODEL.PIXEL_MEAN), tuple(cfg.MODEL.PIXEL_STD), inside)


class Features(nn.Module):
    r"""A copy of a backbone in evaluation mode, on the CPU and in float32.

    .. math:: (p_2, p_3, \dots) = f(x) \quad \text{or} \quad f((\mathrm{pixels} - \mathrm{mean}) / \mathrm{std})

    Args:
        backbone: a Detectron2 backbone, which stays as it is.
        normalisation: how images become its input.

    Shape: (N, 3, H, W) -> a tuple of (N, C_i, H / stride_i, W / stride_i) in the order of :attr:`names`.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, backbone: Backbone, normalisation: Normalisation) -> None:
        super().__init__()
        self.normalisation = normalisation
        self.backbone: Backbone = copy.deepcopy(backbone).cpu().float().eval().requires_grad_(False)
        self._outputs = {name: (shape.channels, shape.stride) for name, shape in backbone.output_shape().items()}
        if normalisation.inside:
            self.register_buffer("pixel_mean", _per_channel(normalisation.pixel_mean), persistent=False)
            self.register_buffer("pixel_std", _per_channel(normalisation.pixel_std), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if self.normalisation.inside:
            images = (images - self.pixel_mean) / self.pixel_std
        features = self.backbone(images)
        return tuple(features[name] for name in self._outputs)

    @property
    def names(self) -> list[str]:
        """The names of the feature maps, in the order of the output."""
        return list(self._outputs)

    @property
    def multiple(self) -> int:
        """Height and width have to be multiples of this number of pixels."""
        return max(1, self.backbone.size_divisibility)

    @property
    def smallest_side(self) -> int:
        """The least height and width, in pixels, at which every feature map is larger than one cell.

        torch.export takes a dimension of size one for another kind of dimension, so its programs begin here.
        """
        largest_stride = max(stride for _, stride in self._outputs.values())
        return (largest_stride // self.multiple + 1) * self.multiple

    def side(self, steps: int) -> int:
        """A height or width to try, in pixels: the smallest one and ``steps`` times 32 or what a multiple needs."""
        return self.smallest_side + steps * max(32, self.multiple)

    def sample(self, batch: int, height: int, width: int, seed: int = 0) -> Tensor:
        """Random images in the range that the function takes, (N, 3, H, W)."""
        noise = torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))
        if self.normalisation.inside:
            return 255 * noise
        return (255 * noise - _per_channel(self.normalisation.pixel_mean)) / _per_channel(self.normalisation.pixel_std)

    def describe(self) -> dict[str, Any]:
        """Input and outputs in words and numbers, for files beside the exported one."""
        return {
            "input": {
                "name": "images",
                "type": "float32",
                "shape": ["N", 3, "H", "W"],
                **asdict(self.normalisation),
                "multiple_of": self.multiple,
                "smallest_side": self.smallest_side,
            },
            "outputs": {name: {"channels": c, "stride": s} for name, (c, s) in self._outputs.items()},
        }


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)
